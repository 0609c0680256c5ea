"""Exceptions of the library.

Read ``base.py`` first: every error derives from its :class:`DeltaTrackerError`. Each message names the offending object
and a remedy. The offending object is also an attribute of the exception. Unless the docstring of the error says
otherwise, a call that raises changes no state: no cursor moves, no row is applied, no version is committed.
"""

from delta_tracker.errors.arguments import InvalidArgumentError as InvalidArgumentError
from delta_tracker.errors.arguments import MissingExtraError as MissingExtraError
from delta_tracker.errors.arguments import UncopyableError as UncopyableError
from delta_tracker.errors.base import DeltaTrackerError as DeltaTrackerError
from delta_tracker.errors.base import StreamError as StreamError
from delta_tracker.errors.base import unraised as unraised
from delta_tracker.errors.handling import is_panic as is_panic
from delta_tracker.errors.handling import is_unknown as is_unknown
from delta_tracker.errors.handling import kind_of as kind_of
from delta_tracker.errors.predictors import FollowEndedError as FollowEndedError
from delta_tracker.errors.predictors import ForkedError as ForkedError
from delta_tracker.errors.predictors import HeldVersionError as HeldVersionError
from delta_tracker.errors.predictors import ModelMismatchError as ModelMismatchError
from delta_tracker.errors.predictors import PartialRowsError as PartialRowsError
from delta_tracker.errors.predictors import WaitTimeoutError as WaitTimeoutError
from delta_tracker.errors.ranks import FencedError as FencedError
from delta_tracker.errors.ranks import LivePublisherError as LivePublisherError
from delta_tracker.errors.ranks import PublishError as PublishError
from delta_tracker.errors.ranks import RankLostError as RankLostError
from delta_tracker.errors.ranks import UnfinishedStepError as UnfinishedStepError
from delta_tracker.errors.recovery import IncompleteModelError as IncompleteModelError
from delta_tracker.errors.recovery import NotRecoverableError as NotRecoverableError
from delta_tracker.errors.recovery import RestoreFailedError as RestoreFailedError
from delta_tracker.errors.recovery import RestoreMismatchError as RestoreMismatchError
from delta_tracker.errors.recovery import TakeoverFailedError as TakeoverFailedError
from delta_tracker.errors.sinks import NO_VERSION as NO_VERSION
from delta_tracker.errors.sinks import SINK_CLOSED as SINK_CLOSED
from delta_tracker.errors.sinks import SINK_FORKED as SINK_FORKED
from delta_tracker.errors.sinks import MalformedSinkError as MalformedSinkError
from delta_tracker.errors.sinks import SinkBusyError as SinkBusyError
from delta_tracker.errors.sinks import SinkError as SinkError
from delta_tracker.errors.stores import AlteredEntryError as AlteredEntryError
from delta_tracker.errors.stores import BrokenCacheError as BrokenCacheError
from delta_tracker.errors.stores import LostEntryError as LostEntryError
from delta_tracker.errors.stores import StaleCacheError as StaleCacheError
from delta_tracker.errors.stores import StorageError as StorageError
from delta_tracker.errors.stores import UnknownOutcomeError as UnknownOutcomeError
from delta_tracker.errors.stores import UnreadablePointerError as UnreadablePointerError
from delta_tracker.errors.stores import UnsupportedStoreError as UnsupportedStoreError
from delta_tracker.errors.stores import WriteRefusedError as WriteRefusedError
from delta_tracker.errors.streams import CONTINUE as CONTINUE
from delta_tracker.errors.streams import CorruptPartError as CorruptPartError
from delta_tracker.errors.streams import MalformedError as MalformedError
from delta_tracker.errors.streams import MirrorDivergedError as MirrorDivergedError
from delta_tracker.errors.streams import MissingVersionError as MissingVersionError
from delta_tracker.errors.streams import NewerFormatError as NewerFormatError
from delta_tracker.errors.streams import NoSnapshotError as NoSnapshotError
from delta_tracker.errors.streams import OlderCopyError as OlderCopyError
from delta_tracker.errors.streams import PinError as PinError
from delta_tracker.errors.streams import StreamReplacedError as StreamReplacedError
from delta_tracker.errors.tracker import LOAD_BEFORE as LOAD_BEFORE
from delta_tracker.errors.tracker import CheckpointError as CheckpointError
from delta_tracker.errors.tracker import DetachedError as DetachedError
from delta_tracker.errors.tracker import NeedsSnapshotError as NeedsSnapshotError
from delta_tracker.errors.tracker import RankMismatchError as RankMismatchError
from delta_tracker.errors.tracker import ReservedConsumerError as ReservedConsumerError
from delta_tracker.errors.tracker import StaleDeltaError as StaleDeltaError
from delta_tracker.errors.tracker import StateMismatchError as StateMismatchError
from delta_tracker.errors.tracker import UnsupportedModelError as UnsupportedModelError
