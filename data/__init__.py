"""Where tokens come from: one file format and one reader (shards.py), one module for each source."""
