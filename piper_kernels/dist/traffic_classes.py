"""Who may use the network first: critical exchanges, then pipeline sends, then what can wait.

An exchange of the experts' rows holds up every rank, a gradient reduction nobody until the
optimizer's step. On one link they would share the bandwidth. Here a transfer starts only while no
more urgent one is under way on this rank, and what can wait is cut into chunks, so an urgent
transfer shares the link with one chunk at most. It is not made to wait for that chunk: on another
rank the chunk's partner may itself be in the exchange.

Once somebody waits for a deferred reduction it is urgent itself, and is no longer held back.
"""

import enum
import queue
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from piper_kernels.dist.reduction_chunks import Piece, cut_into_chunks
from piper_kernels.errors import PiperError, check_dtype, require


class TransferError(PiperError, RuntimeError):
    """A transfer failed on this rank: a peer died, hangs, or sent something else."""


class TrafficClass(enum.IntEnum):
    """Urgency; the lower number goes first."""

    CRITICAL = 0
    PIPELINE = 1
    DEFERRABLE = 2


@dataclass(eq=False)
class DeferredReduction:
    """A reduction that goes on in the background.

    Attributes:
        name: for messages.
        num_chunks: how many pieces of work it is.
        num_done: how many of them are done.
    """

    name: str
    num_chunks: int
    num_done: int = 0
    _changed: threading.Condition = field(default_factory=threading.Condition, repr=False)
    _is_waited_for: bool = False
    _is_finished: bool = False
    _error: BaseException | None = None

    def wait(self) -> None:
        """Wait until the tensors hold the reduced values; from now on nothing holds it back.

        Raises:
            TransferError: a chunk failed here, or one of an earlier reduction did.
        """
        with self._changed:
            self._is_waited_for = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_finished)
        if self._error is not None:
            raise self._error


@dataclass(frozen=True, slots=True)
class _Job:
    handle: DeferredReduction
    tensors: tuple[Tensor, ...]
    chunks: list[list[Piece]]
    group: dist.ProcessGroup | None
    op: dist.ReduceOp.RedOpType
    # on a GPU: when the tensors have been computed
    is_ready: torch.cuda.Event | None


class TrafficClasses:
    """Gives urgent transfers of this rank the network, and reduces gradients in between.

    All ranks must call ``reduce_later`` and ``wait`` in the same order, as with any collective.

    Args:
        chunk_bytes: of a deferred reduction; ``reduction_chunks.chunk_bytes_for`` derives it from
            the wait that an exchange can bear.

    Example:
        Around each exchange ``with classes.transfer(TrafficClass.CRITICAL): ...``; in backward
        ``handles.append(classes.reduce_later([p.grad], group))``; before the optimizer's step
        ``for handle in handles: handle.wait()``; at the end ``classes.close()``.
    """

    def __init__(self, chunk_bytes: int = 1 << 20) -> None:
        require(chunk_bytes >= 1, "TrafficClasses", "chunk_bytes", "be at least 1", chunk_bytes)
        self.chunk_bytes = chunk_bytes
        self._under_way = [0] * len(TrafficClass)
        self._changed = threading.Condition()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._is_closing = False
        self._worker: threading.Thread | None = None
        # on a GPU the host leaves a transfer before the device has made it
        self._last_event: dict[TrafficClass, torch.cuda.Event] = {}

    @contextmanager
    def transfer(self, traffic_class: TrafficClass) -> Iterator[None]:
        """While open, transfers of less urgent classes do not start on this rank.

        Entering waits until no more urgent transfer is under way here.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._may_start(traffic_class))
            self._under_way[traffic_class] += 1
        try:
            yield
        finally:
            with self._changed:
                self._under_way[traffic_class] -= 1
                if torch.cuda.is_available():
                    self._last_event[traffic_class] = _record_event()
                self._changed.notify_all()

    def reduce_later(
        self,
        tensors: Sequence[Tensor],
        group: dist.ProcessGroup | None = None,
        *,
        op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
        name: str = "gradients",
    ) -> DeferredReduction:
        """All-reduce tensors in place, chunk by chunk, whenever nothing more urgent is under way.

        Args:
            tensors: contiguous, of one dtype and device; not to be touched before ``wait``.
            group: its ranks reduce the same tensors in the same order; a group of its own, since
                its chunks run beside other collectives. ``None``: the default group.
            op: SUM, AVG, MAX, ...
            name: for messages.

        Raises:
            ConfigError: a tensor is not contiguous.
            DtypeError: tensors of different dtypes.
        """
        where = "TrafficClasses.reduce_later"
        for index, tensor in enumerate(tensors):
            label = f"tensors[{index}]"
            check_dtype(where, label, tensor, (tensors[0].dtype,), "Reduce each dtype by itself.")
            remedy = "Call contiguous() and copy the result back."
            fits = tensor.is_contiguous()
            require(fits, where, label, "be contiguous", f"strides {tensor.stride()}", remedy)
        sizes = [tensor.numel() for tensor in tensors]
        element_bytes = tensors[0].element_size() if tensors else 1
        chunks = cut_into_chunks(sizes, element_bytes, self.chunk_bytes)
        flat = tuple(tensor.detach().view(-1) for tensor in tensors)
        handle = DeferredReduction(name, len(chunks), _changed=self._changed)
        is_ready = _record_event() if any(tensor.is_cuda for tensor in tensors) else None
        self._start_worker()
        self._jobs.put(_Job(handle, flat, chunks, group, op, is_ready))
        return handle

    def close(self) -> None:
        """Finish what was begun, without holding anything back, and end the background thread."""
        if self._worker is not None:
            self._jobs.put(None)
            with self._changed:
                self._is_closing = True
                self._changed.notify_all()
            self._worker.join()
            self._worker = None

    def _may_start(self, traffic_class: TrafficClass) -> bool:
        return not any(self._under_way[:traffic_class])

    def _start_worker(self) -> None:
        if self._worker is None:
            self._is_closing = False
            name = "piper-deferred-reductions"
            self._worker = threading.Thread(target=self._work, name=name, daemon=True)
            self._worker.start()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._reduce(job)
            except BaseException as error:
                # later chunks of the others would meet the wrong ones of this rank
                self._error = error
            with self._changed:
                job.handle._error = self._error
                job.handle._is_finished = True
                self._changed.notify_all()

    def _reduce(self, job: _Job) -> None:
        for chunk in job.chunks:
            if self._error is not None:
                return
            self._wait_for_turn(job.handle)
            try:
                _reduce_chunk(job, chunk)
            except RuntimeError as error:
                handle = job.handle
                place = f"chunk {handle.num_done + 1} of {handle.num_chunks}"
                message = f"rank {dist.get_rank()}: reduction of {handle.name}, {place}: {error}"
                raise TransferError(message) from error
            job.handle.num_done += 1

    def _wait_for_turn(self, handle: DeferredReduction) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._may_start(TrafficClass.DEFERRABLE)
                    or handle._is_waited_for
                    or self._is_closing
                )
            )
            events = list(self._last_event.values())
        for event in events:
            event.synchronize()


def _record_event() -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record()
    return event


def _reduce_chunk(job: _Job, chunk: Sequence[Piece]) -> None:
    if job.is_ready is None:
        _reduce_parts(job, chunk)
        return
    with torch.cuda.device(job.tensors[0].device):
        stream = torch.cuda.Stream()
        stream.wait_event(job.is_ready)
        with torch.cuda.stream(stream):
            _reduce_parts(job, chunk)
        # the next chunk must not be on the device before this one has left it
        stream.synchronize()


def _reduce_parts(job: _Job, chunk: Sequence[Piece]) -> None:
    parts = [job.tensors[piece.index][piece.start : piece.end] for piece in chunk]
    if len(parts) == 1:
        dist.all_reduce(parts[0], op=job.op, group=job.group)
        return
    packed = torch.cat(parts)
    dist.all_reduce(packed, op=job.op, group=job.group)
    sizes = [piece.num_elements for piece in chunk]
    for part, reduced in zip(parts, packed.split(sizes), strict=True):
        part.copy_(reduced)
