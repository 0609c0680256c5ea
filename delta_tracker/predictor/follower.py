"""Background thread of a predictor, which polls for versions, applies them, and writes heartbeats."""

import logging
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue

from delta_tracker.arguments import check_seconds
from delta_tracker.errors import (
    DeltaTrackerError,
    FollowEndedError,
    HeldVersionError,
    InvalidArgumentError,
    ModelMismatchError,
    NoSnapshotError,
    StaleCacheError,
    StreamError,
    is_panic,
    kind_of,
    without_traceback,
)
from delta_tracker.live_objects import Forkable, protect
from delta_tracker.predictor.polling import GapChecks, PollSchedule, jittered
from delta_tracker.predictor.reader import Reader
from delta_tracker.predictor.status import type_and_message
from delta_tracker.stream.heartbeat import BEAT_SECONDS, HeartbeatWriter
from delta_tracker.stream.interruption import Interrupted, check, interruptible
from delta_tracker.stream.notify.notifier import Hints, Notifier
from delta_tracker.stream.reading.runtime import Runtime
from delta_tracker.stream.storage.storage import Location, Storage, open_storage
from delta_tracker.stream.storage.url import LOCAL_POLL_SECONDS, REMOTE_POLL_SECONDS

_logger = logging.getLogger(__name__)
_STALE_SECONDS = 1.0  # between two reads of an object that is stale in a cache
_PIN_SECONDS = 5.0  # maximum time between two looks for a pin
# Longest intervals between two polls, while no version comes and while hints arrive.
_LONGEST_SECONDS = {"directory": (0.1, 1.0), "remote": (5.0, 30.0)}
_BEAT_SECONDS = 2.0  # interval at which a long wait writes a heartbeat if one is due
_START_SECONDS = 2.0  # maximum time that start() waits for the thread's first check
_LAST_SECONDS = 1.0  # maximum time that stop() waits for the last heartbeat
_LOCK_SECONDS = 0.1  # interval at which a wait for the lock checks the stop flag


class _Run:
    """State of one thread of a follower."""

    def __init__(self, storage: Storage, seconds: float | None, notifier: Notifier | None, runtime: Runtime) -> None:
        self.stop, self.over = threading.Event(), threading.Event()  # ends the thread; set when it ends
        self.begun: Future[None] = Future()  # result of the first check
        self.hints = Hints(notifier, self.stop, runtime)
        self.gaps = GapChecks(runtime)
        self.waits_for_snapshot = False  # True once this was logged
        self.thread: threading.Thread | None = None
        self._poll_seconds, self._runtime = seconds, runtime
        self.poll(storage)

    def poll(self, storage: Storage) -> None:
        """Set the poll schedule for ``storage``. The default intervals depend on the kind of store."""
        poll_seconds = self._poll_seconds
        default = REMOTE_POLL_SECONDS if storage.is_remote else LOCAL_POLL_SECONDS
        longest, longest_hinted = _LONGEST_SECONDS["remote" if storage.is_remote else "directory"]
        self.storage = storage
        self.schedule = PollSchedule(
            default if poll_seconds is None else poll_seconds,
            is_fixed=poll_seconds is not None,
            longest=longest,
            longest_hinted=longest_hinted,
            is_delayed=not storage.lists,
            runtime=self._runtime,
        )


class Follower(Forkable):
    """Background thread of a predictor, which calls :meth:`Reader.advance` in a loop to apply new versions.

    After an ``Exception`` or a panic in Rust code, the thread retries. The thread ends after a call of :meth:`stop`, or
    after any other exception, such as ``SystemExit``.

    Attributes:
        error: error of the last attempt, or error that ended the thread, without traceback; None if there is no error.
        lock: lock to acquire before applying a version, in any thread.
    """

    def __init__(self, reader: Reader, heartbeats: "PredictorHeartbeats | None") -> None:
        self.error: Exception | None = None
        self.lock = threading.Lock()
        self._reader = reader
        self._heartbeats = heartbeats
        self._runtime = reader.runtime
        # Held while the thread is started or stopped. Reentrant, because a signal handler may then call stop().
        self._control = threading.RLock()
        self._active: _Run | None = None
        # One queue for each call of wait(), which gets an item when a version was applied, and when the thread ends. No
        # lock, because a signal handler that calls stop() waits for the thread while the main thread is in wait().
        self._waiters: list[SimpleQueue[None]] = []
        protect(self)

    @property
    def is_running(self) -> bool:
        """True if the thread is running."""
        return self._active is not None and not self._active.over.is_set()

    @property
    def current_error(self) -> Exception | None:
        """Current error: :attr:`error`, or else the error of the held version; None if there is neither."""
        gate = self._reader.writer.gate
        return self.error or (None if gate is None else gate.held)

    @property
    def poll_seconds(self) -> float | None:
        """Current interval between two polls in seconds; None if the thread is not running."""
        run = self._active
        return None if run is None or run.over.is_set() else run.schedule.seconds

    def start(self, poll_seconds: float | None, notifier: Notifier | None) -> None:
        """Start the thread. The thread first checks that the newest version fits the model, and then polls.

        Wait at most two seconds for the result of the check. Raise the error if the check fails within this time. See
        :meth:`Predictor.follow` for the arguments.
        """
        check_seconds("poll_seconds", poll_seconds)
        with self._control:
            if self.is_running:
                raise InvalidArgumentError("follow()", "already following", "Call stop() first")
            self.error = None
            run = _Run(self._reader.storage, poll_seconds, notifier, self._runtime)
            run.thread = self._runtime.thread(target=self._run, args=(run,), name="predictor", daemon=True)
            self._active = run  # before the thread runs: code in it may call stop()
            try:
                run.thread.start()
            except BaseException:
                run.stop.set()  # the thread may have been started
                self._active = None
                raise
            try:
                wait([run.begun], _START_SECONDS)
                if not run.begun.cancel():
                    run.begun.result()
            except BaseException:
                self._end(run)
                raise

    def stop(self, *, raises: bool = True) -> None:
        """Set the stop flag, which the thread checks at requests and waits, and wait until the thread has ended.

        If :attr:`error` is not None, raise a copy of the error. If ``raises`` is False, log the error instead.
        """
        if self._is_own_thread:
            raise InvalidArgumentError("stop()", "called in the thread of follow()", "Call it in another thread")
        with self._control:
            if self._active is None:
                return
            self._end(self._active)
            self._write_last_heartbeat()
        if self.error is not None and raises:
            raise without_traceback(self.error)
        if self.error is not None:
            _logger.warning("predictor stopped with an error: %s", self.error)

    def wait(self, is_there: Callable[[], bool], seconds: float | None) -> bool:
        """Wait up to ``seconds`` (None for no limit) until ``is_there()`` returns True. Return False on timeout."""
        if self._is_own_thread:
            raise InvalidArgumentError("wait()", "called in the thread of follow()", "Call it in another thread")
        waiter, end = SimpleQueue[None](), None if seconds is None else self._runtime.monotonic() + seconds
        try:
            self._waiters.append(waiter)
            while not is_there() and self.is_running:
                waiter.get(timeout=None if end is None else max(0.0, end - self._runtime.monotonic()))
        except Empty:
            pass
        finally:
            with suppress(ValueError):  # interrupted before it was added
                self._waiters.remove(waiter)
        if is_there():
            return True
        error = self.error
        if isinstance(error, FollowEndedError):
            raise without_traceback(error)
        if not self.is_running:
            raise InvalidArgumentError("wait()", "not following", "Call follow() first, or sync() instead")
        return False

    def wake_waiters(self) -> None:
        """Wake all threads that are blocked in :meth:`wait`. Call this after applying versions."""
        for waiter in tuple(self._waiters):
            waiter.put(None)

    def after_sync(self) -> None:
        """Write a heartbeat if one is due. Clear :attr:`error` if no thread is running. Call this after ``sync()``."""
        if self.error is not None and not self.is_running:
            self.error = None
        self._write_heartbeat()

    def after_fork_in_child(self) -> None:
        """Mark the thread as ended, because it does not exist in the child process. Replace all locks with new ones."""
        if self._is_own_thread:
            return  # this thread forked, in a method of a RowTarget, and continues in the child
        self.lock, self._control, self._waiters = threading.Lock(), threading.RLock(), []
        if self._active is not None and not isinstance(self.error, FollowEndedError):
            self.error = FollowEndedError("no thread applies versions here", "Call follow() or sync() in this process")
        self._active = None

    @property
    def _is_own_thread(self) -> bool:
        return self._active is not None and self._active.thread is threading.current_thread()

    def _write_heartbeat(self, seconds: float | None = None) -> None:
        if self._heartbeats is not None:
            self._heartbeats.write(self.current_error, self.poll_seconds, seconds=seconds)

    def _write_last_heartbeat(self) -> None:
        """Write a last heartbeat unless the thread ended with an error. Give up after about a second."""
        if self._heartbeats is None or isinstance(self.error, FollowEndedError):
            return
        stop = threading.Event()

        def write() -> None:
            with interruptible(stop), suppress(Interrupted):
                self._write_heartbeat(0.0)

        thread = self._runtime.thread(target=write, name="last-heartbeat", daemon=True)
        with suppress(RuntimeError):  # the system has no more threads
            thread.start()
            try:
                thread.join(_LAST_SECONDS)
            finally:
                stop.set()
                thread.join()

    def _end(self, run: _Run) -> None:
        """Stop the thread of ``run`` and wait until the thread has ended. An interrupted call can be repeated."""
        assert run.thread is not None, "set before the run is active"
        run.stop.set()
        run.over.wait()  # join() alone is not enough: Python 3.11 considers the thread ended if join() is interrupted
        run.thread.join()
        self._active = None

    def _run(self, run: _Run) -> None:
        try:
            self._follow(run)
        except BaseException as error:  # noqa: BLE001  raised before the first poll, for example for lack of memory
            self.error = ended = without_traceback(FollowEndedError(error))
            _logger.error("predictor could not follow: %s", str(ended))  # noqa: TRY400  start() raises it
            with suppress(InvalidStateError):  # start() has returned
                run.begun.set_exception(ended)
        finally:
            run.over.set()
            self.wake_waiters()

    def _follow(self, run: _Run) -> None:
        """Poll until the stop flag is set or an exception ends the thread."""
        with interruptible(run.stop), suppress(Interrupted):
            if not self._report_start(run.begun):
                return
            try:
                while not run.stop.is_set():
                    self._turn(run)
                    if self._reader.storage is not run.storage:  # another source, perhaps of another kind
                        run.poll(self._reader.storage)
            except Interrupted:
                raise
            except BaseException as error:  # noqa: BLE001  a thread has no caller that could handle it
                what = _described(error)  # first: without_traceback() changes an error that it cannot copy
                self.error = ended = without_traceback(FollowEndedError(error))
                url = self._reader.storage.url
                _logger.error("predictor stopped following %s: %s", url, what)  # noqa: TRY400  see _described
                self._record_errors(run, lambda: self._write_heartbeat(BEAT_SECONDS))
                self.error = ended

    def _report_start(self, begun: Future[None]) -> bool:
        """Check the newest version, and pass the result to :meth:`start`. Return False if :meth:`start` will raise."""
        refusal: BaseException | None = None
        try:
            with self._held_lock():
                self._check_newest()
        except Interrupted:
            raise
        except BaseException as error:  # noqa: BLE001  start() raises it
            refusal = error
        if not begun.set_running_or_notify_cancel():
            return True  # start() has returned
        if refusal is None:
            begun.set_result(None)
        else:
            begun.set_exception(refusal)
        return refusal is None

    def _check_newest(self) -> None:
        try:
            newest = self._reader.newest()
        except StreamError as error:
            _logger.info("the newest version was not checked before follow(): %s", error)
            return
        for manifest in newest:
            try:
                self._reader.writer.resolve(manifest)
            except (ModelMismatchError, InvalidArgumentError) as error:
                # A predictor with rows serves them, and states in its heartbeat why it stays at their version.
                is_changed = isinstance(error, ModelMismatchError) or error.argument == "tables"
                if self._reader.position is None or not is_changed:
                    raise

    @contextmanager
    def _held_lock(self) -> Iterator[None]:
        while not self.lock.acquire(timeout=_LOCK_SECONDS):
            check()
        try:
            yield
        finally:
            self.lock.release()

    def _turn(self, run: _Run) -> None:
        """Poll once, and write a heartbeat if one is due. If no version was applied, wait for the next poll or hint."""
        runtime, schedule, hints = self._runtime, run.schedule, run.hints
        has_moved = self._record_errors(run, lambda: self._poll(run))
        self._record_errors(run, self._write_heartbeat)
        if has_moved:
            schedule.version_applied()
            self.wake_waiters()
            return
        position = self._reader.position
        if self.error is not None or position is None:
            runtime.wait(run.stop, jittered(schedule.retry_seconds, runtime))
            return
        pause, num_failures = schedule.pause(), hints.num_failures
        if self._reader.orders.policy.follows_pins:
            pause = min(pause, _PIN_SECONDS)
        end = runtime.monotonic() + pause
        while (left := end - runtime.monotonic()) > 0 and not run.stop.is_set():
            is_hinted = hints.wait(position.stream, position.version, min(left, _BEAT_SECONDS))
            if hints.num_failures != num_failures:
                num_failures = hints.num_failures
                schedule.hints_failed()
            if is_hinted:
                schedule.hint_received()
                return
            if left > _BEAT_SECONDS:
                self._record_errors(run, self._write_heartbeat)

    def _poll(self, run: _Run) -> bool:
        # An error may have been found by a gap check. Only another one can show that it no longer exists.
        looks_for_gap = self.error is not None or run.gaps.is_due
        has_moved = False
        try:
            with self._held_lock():
                has_moved = self._reader.advance(looks_for_gap=looks_for_gap)
        except NoSnapshotError as error:
            if not run.waits_for_snapshot:
                run.waits_for_snapshot = True
                _logger.warning("predictor waits for the first snapshot: %s", error.problem)
            self.error = None
            run.schedule.found_no_stream()
        else:
            if self.error is not None:
                _logger.warning("predictor recovered at version %s", self._reader.version)
            self.error = None
            run.schedule.poll_succeeded()
        finally:
            if looks_for_gap and not has_moved:
                run.gaps.done(found_none=self.error is None and self._reader.source.has_listed)
        return has_moved

    def _record_errors(self, run: _Run, call: Callable[[], object]) -> bool:
        """Return ``bool(call())``. If ``call`` raises an error or a Rust panic, record it and return False."""
        try:
            return bool(call())
        except Exception as error:  # noqa: BLE001  every error is retried, for example of memory, the store or a user's target
            self._failed(run, error)
        except BaseException as error:
            if not is_panic(error):
                raise
            problem = f"Rust code panicked: {type(error).__name__}: {error}"
            self._failed(run, StreamError(problem, "Report it to the authors of that package; follow() retries"))
        return False

    def _failed(self, run: _Run, error: Exception) -> None:
        run.schedule.poll_failed(_STALE_SECONDS if isinstance(error, StaleCacheError) else None)
        is_new = self.error is None or kind_of(error) != kind_of(self.error)
        if is_new and not isinstance(error, HeldVersionError):
            _logger.warning("predictor failed and retries: %s", _described(error))
        self._reader.gauges.recorder.follow_errors.cell(reason=type(error).__name__).add(1)
        self.error = without_traceback(error)


def _described(error: BaseException) -> str:
    """Return the message of a :class:`StreamError`, or the type, message, file and line of another error."""
    if isinstance(error, StreamError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__, limit=-1)
    where = "".join(f" ({frame.filename}:{frame.lineno})" for frame in frames)
    return f"{type(error).__name__}: {error}{where}"


class PredictorHeartbeats:
    """Writer of a predictor's heartbeats. ``given`` is the store; None for the first writable store of ``reader``."""

    def __init__(self, reader: Reader, name: str, given: Location | None) -> None:
        stores = [each.storage for each in reader.sources.all] if given is None else [open_storage(given)]
        storage = next((each for each in stores if not each.is_read_only), None)
        if storage is None:
            text = "Pass the url of a bucket or directory: heartbeats cannot be written over http"
            raise InvalidArgumentError("heartbeats", given, text)
        self._reader = reader
        self._writer = HeartbeatWriter(storage, name)
        self._source = reader.source if given is None else None  # None if heartbeats do not move

    def write(self, error: Exception | None, poll_seconds: float | None, *, seconds: float | None = None) -> None:
        """Write a heartbeat if one is due, or if ``seconds`` is not None.

        ``seconds`` is the time until the next heartbeat; 0 reports that the predictor was stopped. ``poll_seconds`` is
        passed to :func:`lag`.
        """
        reader, source = self._reader, self._reader.source
        if self._source not in (None, source):
            self._source = source
            if not source.storage.is_read_only:
                self._writer.move_to(source.storage)
        if seconds is None and not self._writer.is_due():
            return
        behind = None if seconds == 0 else lag(reader, poll_seconds if error is None else None)
        lag_versions, lag_seconds = behind or (None, None)
        position, canary = reader.position, source.canary
        self._writer.write(
            stream=None if position is None else position.stream,
            version=None if position is None else position.version,
            lag_versions=lag_versions,
            lag_seconds=lag_seconds,
            resyncs=reader.resyncs.count,
            error=type_and_message(error),
            canary_versions=None if canary is None else canary.versions,
            canary_seconds=None if canary is None else canary.seconds,
            pin=0 if reader.orders.followed is None else reader.orders.followed.counter,
            why=reader.why,
            next_step=error.remedy if isinstance(error, DeltaTrackerError) else "",
            differences="; ".join(reader.writer.destination.differences),
            seconds=BEAT_SECONDS if seconds is None else seconds,
        )


def lag(reader: Reader, poll_seconds: float | None = None) -> tuple[int, float] | None:
    """Return the number of committed versions that are not applied, and the age in seconds of the oldest of them.

    Returns None if the store cannot be read, or if its log ends before the last applied version. ``poll_seconds`` is
    the poll interval of a running thread. If the thread has just polled and found no version, no request is sent.
    """
    version, source = reader.version, reader.source
    empty_poll = source.lag.empty_poll
    if poll_seconds is not None and empty_poll is not None:
        is_recent = reader.runtime.monotonic() - empty_poll[1] <= 2 * poll_seconds + 1.0
        if empty_poll[0] == version and is_recent:
            return 0, 0.0
    try:
        return source.lag.of(source.log, version)
    except StreamError:
        return None
