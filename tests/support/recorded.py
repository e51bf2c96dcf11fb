"""A CUDA graph without CUDA: records torch's operations and the launches of Triton's interpreter, and repeats
them with the same arguments, on the same memory.

As in a CUDA graph, recording changes nothing outside: memory that existed before is put back. Memory of the
recording's own is then filled with a pattern, so that a replay which read a value from the time of recording
would see it. Reading a value on the host while recording is an error, as it is there.
"""

from contextlib import contextmanager, nullcontext

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from narrowgauge.kernels.triton import launch as door
from narrowgauge.quantization.passes import in_c

PATTERN = 0xA5
_FREE = ("empty", "lift_fresh")


class Recording(TorchDispatchMode):
    """The launches of one `with` block."""

    def __init__(self):
        super().__init__()
        self.calls, self.before, self.own = [], {}, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        assert func is not torch.ops.aten._local_scalar_dense.default, "the host reads a value"
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        self._keep(given)
        out = func(*args, **kwargs)
        known = {_key(t) for t in given}
        results = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        new = [t for t in results if _key(t) not in known]
        self.own |= {_key(t): t for t in new}
        self.calls.append((func, args, kwargs, out, [_key(t) not in known for t in results]))
        return out

    def launch(self, run, *launch):
        with _disable_current_modes():
            self._keep([a for a in launch[2] if isinstance(a, torch.Tensor)])
            run(*launch)
        self.calls.append((run, launch, {}, None, []))

    def _keep(self, tensors):
        """Keep what memory from outside contains before the first operation on it."""
        for t in tensors:
            if _key(t) not in self.own and _key(t) not in self.before:
                self.before[_key(t)] = t, t.untyped_storage().clone()

    def end(self):
        """Put memory from outside back, and forget the values of the recording's own."""
        for t, content in self.before.values():
            t.untyped_storage().copy_(content)
        for t in self.own.values():
            torch.empty(0, dtype=torch.uint8).set_(t.untyped_storage()).fill_(PATTERN)

    def replay(self):
        for func, args, kwargs, out, are_new in self.calls:
            if getattr(func, "__name__", "").startswith(_FREE):
                continue
            again = func(*args, **kwargs)
            results = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
            others = [t for t in tree_leaves(again) if isinstance(t, torch.Tensor)]
            for to, t, is_new in zip(results, others, are_new, strict=True):
                if is_new:
                    to.copy_(t)


def _key(t):
    return t.untyped_storage()._cdata


class Recordings:
    """A recorder (`MicroBatchGraphs`) that keeps its recordings."""

    def __init__(self, monkeypatch):
        self.recordings, self.releases = [], 0
        self._active = []
        right = door.perform

        def perform(*launch):
            if self._active:
                self._active[-1].launch(right, *launch)
            else:
                right(*launch)

        monkeypatch.setattr(door, "perform", perform)
        # no pass in C runs on a GPU, and torch sees no call of one
        monkeypatch.setattr(in_c, "has_library", lambda x: False)

    def aside(self):
        return nullcontext()

    @contextmanager
    def _recording(self):
        recording = Recording()
        self._active.append(recording)
        try:
            with recording:
                yield recording
        finally:
            self._active.pop()

    def record(self, run):
        with self._recording() as recording:
            run()
        with torch.no_grad():
            recording.end()
        self.recordings.append(recording)

        def replay():
            with torch.no_grad():
                recording.replay()

        return replay

    def release(self):
        self.releases += bool(self.recordings)
        self.recordings.clear()
