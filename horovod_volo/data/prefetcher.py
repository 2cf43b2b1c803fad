"""Prefetches batches: one thread reads them, DALI or Pillow decodes them, and they are returned in order.

The reading thread stays some batches ahead of the pipeline, and the pipeline stays ahead of the consumer. On
a CPU, the consumer reads while the images are cached: threads that run Python wait for each other.

Invariant: a pipeline returns batches in the order in which it was fed, so the oldest entry of `_decoding`
belongs to the next batch that it returns. Every batch fed to it is appended there exactly once.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from threading import Barrier
from time import perf_counter
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from horovod_volo.data.image_decoder import Input, Source, to_torch, undecodable


@dataclass(frozen=True, eq=False)
class PendingBatch:
    """A batch that has been read, but not decoded."""

    indices: NDArray[np.int64]  # (batch,) positions in the catalog
    inputs: tuple[Input, ...]  # of the pipeline; the encoded images come first


Pending = TypeVar("Pending", bound=PendingBatch)
Item = TypeVar("Item")
Result = TypeVar("Result")
# Reading a cached image takes 0.1 ms, mostly in Python, whose lock threads and a GPU's launches wait for.
READING_ALONE_SECONDS, _ITEMS_OF_PATIENCE = 3e-4, 16
_CACHED_SECONDS = 2e-4  # of reading an image that is cached: 0.1 ms or less
_READS_REMEMBERED = 4


class BatchPrefetcher(Generic[Pending]):
    """Reads and decodes batches ahead of their use, with one pipeline for all epochs."""

    def __init__(
        self,
        build_pipeline: Callable[[Source], Any],
        device: torch.device,
        depth: int,
        on_undecodable: Callable[[int], object],
        transform: Callable[[Pending, Any], torch.Tensor] = lambda pending, decoded: to_torch(decoded),  # noqa: ARG005
        undecodable: Callable[[Input], list[int]] = undecodable,
    ) -> None:
        """Start the reading thread; the first batch builds the pipeline.

        `depth` is the number of batches read ahead, `transform` makes a batch's images of what was decoded,
        `on_undecodable` is called with the index of each image that `undecodable` has found in a batch.
        """
        self._on_undecodable = on_undecodable
        self._build_pipeline = build_pipeline
        self._transform = transform
        self._undecodable = undecodable
        self._device = device
        self._depth = depth
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batch-reader")
        self._to_read: Iterator[Callable[[], Pending]] = iter(())
        # The reads of the next batches; None: to be read by the consumer.
        self._reading: deque[tuple[Callable[[], Pending], Future[Pending] | None]] = deque()
        self._were_cached = deque([True], maxlen=_READS_REMEMBERED)
        self._decoding: deque[tuple[Callable[[], Pending], Pending]] = deque()
        self._iteration: object = None  # identifies the current call of `batches`
        self._prepared: tuple[Pending, torch.Tensor] | None = None  # by `prepare_next`
        self._pipeline: Any = None
        self._closed = False

    def batches(self, reads: Iterable[Callable[[], Pending]]) -> Generator[tuple[Pending, torch.Tensor]]:
        """Yield what each of `reads` returns with its images (batch, 3, image_size, image_size).

        A new call ends the iteration of an earlier one.
        """
        self.stop()
        self._iteration = iteration = object()
        self._were_cached.append(True)  # the images may be cached now: try
        self._to_read = iter(reads)
        try:
            while True:
                batch, self._prepared = self._prepared or self._next_batch(), None
                if batch is None:
                    return
                yield batch
                if self._iteration is not iteration:
                    raise RuntimeError("this iteration ended when a later one began or the loader was closed")
        finally:
            if self._iteration is iteration:
                self.stop()

    def prepare_next(self) -> None:
        """Decode and transform the next batch of the current iteration before it is asked for."""
        if self._iteration is not None and self._prepared is None:
            self._prepared = self._next_batch()

    def stop(self) -> None:
        """End the current iteration and drop the batches read ahead."""
        self._iteration = self._prepared = None
        self._to_read = iter(())
        for _, future in self._reading:
            if future is not None:
                future.cancel()
        self._reading.clear()
        if self._pipeline is not None:
            self._empty_pipeline()
        self._decoding.clear()

    def close(self) -> None:
        """End the current iteration and all threads."""
        if self._closed:
            return
        self._closed = True
        self.stop()
        self._reader.shutdown(cancel_futures=True)
        self._pipeline = None  # the last reference: its threads end with it

    def _empty_pipeline(self) -> None:
        try:
            while True:
                self._pipeline.run()
        except StopIteration:
            self._pipeline.reset()
        except RuntimeError:  # one image that it cannot decode makes the whole pipeline invalid
            self._pipeline = None

    def _next_batch(self) -> tuple[Pending, torch.Tensor] | None:
        decoded = self._decode_next()
        if decoded is None:
            return None
        _, pending = self._decoding.popleft()
        return pending, self._transform(pending, decoded)

    def _decode_next(self) -> Any | None:
        on_gpu = self._device.type == "cuda"
        while True:
            if self._pipeline is None:
                self._pipeline = self._build_pipeline(self._next_inputs)
            try:
                # On the training step's stream, the GPU waits for the batch and the host does not.
                (images,) = self._pipeline.run(torch.cuda.current_stream(self._device) if on_gpu else None)
            except StopIteration:
                return None
            except RuntimeError as error:
                self._restart_without_undecodable(error)
            else:
                return images

    def _restart_without_undecodable(self, cause: RuntimeError) -> None:
        """Report the images that cannot be decoded, read their batches again, and rebuild the pipeline."""
        batches = [pending for _, pending in self._decoding]
        found = [each.indices[place] for each in batches for place in self._undecodable(each.inputs[0])]
        if not found:
            raise cause
        for index in found:
            self._on_undecodable(int(index))
        again = [(read, self._begin(read)) for read, _ in self._decoding]
        self._decoding.clear()
        self._reading.extendleft(reversed(again))
        self._pipeline = None

    def _next_inputs(self) -> tuple[Input, ...]:
        self._read_ahead()
        if not self._reading:
            raise StopIteration
        read, future = self._reading.popleft()
        pending = self._read(read) if future is None else future.result()
        self._read_ahead()
        self._decoding.append((read, pending))
        return pending.inputs

    def _read_ahead(self) -> None:
        while len(self._reading) < self._depth:
            read = next(self._to_read, None)
            if read is None:
                return
            self._reading.append((read, self._begin(read)))

    def _begin(self, read: Callable[[], Pending]) -> Future[Pending] | None:
        by_consumer = self._device.type == "cpu" and any(self._were_cached)
        return None if by_consumer else self._reader.submit(self._read, read)

    def _read(self, read: Callable[[], Pending]) -> Pending:
        began = perf_counter()
        pending = read()
        self._were_cached.append(perf_counter() - began < _CACHED_SECONDS * len(pending.indices))
        return pending


class ImageThreadPool:
    """Threads that process the images of a batch in parallel, each with torch limited to one thread.

    Several images at a time fill the cores better than several threads for each image.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._threads = threads
        self._is_quick = True  # whether the last batch took about as long as the caller works alone
        self._pool = ThreadPoolExecutor(max_workers=threads, thread_name_prefix=name)
        all_started = Barrier(threads)

        def start() -> None:
            torch.set_num_threads(1)
            torch.get_num_threads()  # the setting takes effect for a thread when it first reads it
            all_started.wait()

        before = torch.get_num_threads()
        wait([self._pool.submit(start) for _ in range(threads)])
        torch.set_num_threads(before)  # OpenMP has a setting for each thread, but MKL one for all

    def map(
        self, function: Callable[[Item], Result], batch: Sequence[Item], alone_seconds: float = 0.0
    ) -> list[Result]:
        """Apply a function to each item; an exception is raised after all threads have stopped.

        The caller works alone while an item takes about `alone_seconds`, unless the last batch was slow.
        """
        positions = iter(range(len(batch)))  # shared: each thread takes the next one

        def work() -> list[tuple[int, Result]]:
            return [(position, function(batch[position])) for position in positions]

        results, began = dict[int, Result](), perf_counter()
        for position in positions if self._is_quick and alone_seconds else ():
            results[position] = function(batch[position])
            if perf_counter() - began > alone_seconds * (_ITEMS_OF_PATIENCE + len(results)):
                break
        workers = [self._pool.submit(work) for _ in range(min(self._threads, len(batch) - len(results)))]
        wait(workers)
        for worker in workers:
            results.update(worker.result())
        self._is_quick = perf_counter() - began < alone_seconds * (_ITEMS_OF_PATIENCE + len(batch))
        return [results[position] for position in range(len(batch))]

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
