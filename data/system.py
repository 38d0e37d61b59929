"""For programs that work for hours on somebody's machine: threads, streams, locks, replaced files."""
import os
import shutil
import signal
import sys
import time
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

def quiet_threads():
    """Before torch is imported: have its threads sleep soon when they wait for each other. By default they
    spin so long that tiny models train many times slower as soon as another process needs a core."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")   # GNU's OpenMP, PyTorch's on Linux: turns of a loop
        os.environ.setdefault("KMP_BLOCKTIME", "1")   # LLVM's and Intel's, elsewhere: milliseconds

def prepare():
    """What a script does before it imports torch. See also `guarded` in train.py, which takes Ctrl-C back."""
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)   # Ctrl-C meanwhile: leave, without a traceback
    quiet_threads()
    for name in ("stdin", "stdout", "stderr"):   # where one is closed, the next file would take its number
        if getattr(sys, name) is None:
            mute(name)

def mute(name):
    """From now on, this standard stream is the null device."""
    number = ("stdin", "stdout", "stderr").index(name)
    stream = open(os.devnull, "w" if number else "r")
    os.dup2(stream.fileno(), number)
    os.set_inheritable(number, True)   # children have it, too
    setattr(sys, name, stream)

def say(text):
    """A line on stderr, from one of the processes that torchrun started, if anybody is left to read it."""
    from tqdm import tqdm   # not before `prepare`
    if os.environ.get("LOCAL_RANK", "0") == "0":
        with suppress(OSError):
            tqdm.write(text, file=sys.stderr)

def lock(file, wait=False):
    """Whether this process has the lock of an open file now. It ends with the file or the process. None where
    there are no locks, as on Windows and some network disks."""
    for tenths in count():
        try:
            import fcntl   # Windows has none
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if not wait:
                return False
            if tenths == 50:
                say(f"waiting for {file.name}, which another process holds")
            time.sleep(0.1)
        except (ImportError, OSError):
            return None

def remove(*paths):
    """Delete files, as far as that is possible now: Windows keeps what a process has open."""
    for path in paths:
        with suppress(OSError):
            Path(path).unlink()

@contextmanager
def replacing(path):
    """A binary file to write, which takes the place of path when it is complete. Whatever happens, path is
    whole, the old one or the new one. What goes wrong with it is an OSError that names path."""
    target = os.path.realpath(path)   # a link stays one
    beside = f"{target}.{os.getpid()}.tmp"
    try:
        with open(beside, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileNotFoundError):
            shutil.copymode(target, beside)
        os.replace(beside, target)
    except OSError as error:
        if error.filename in (None, beside):   # not of a file that was read meanwhile
            raise cannot_write(path, error) from None
        raise
    finally:
        remove(beside)   # of a try that failed

def cannot_write(path, error, place="place"):
    """The OSError for a file that could not be written, in words that name it."""
    reason = error.strerror or error
    return OSError(f"{path} cannot be written ({reason}): make room, or choose another {place}")
