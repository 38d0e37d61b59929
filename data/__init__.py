"""Where tokens come from: one file format and one reader (shards.py), one module for each source. And what
long runs need of the machine that they run on (system.py)."""
