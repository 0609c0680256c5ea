"""Faults of the tracker and its log, by the generator that finds them."""

from __future__ import annotations

from tests.reverts.mutation import DoesNothing, Loses, Replaces, Returns
from tests.reverts.revert import Revert

REVERTS = {
    "tests/tracker/test_several_stores.py::test_each_table_has_the_rows_that_it_has_alone": [
        Revert(
            "tables that are marked together exchange the rows that are new",
            Replaces("JointIds.new_padded", "self.indices + _", "self.indices"),
        ),
    ],
    "tests/buffers/test_cuda_fence.py::test_a_use_that_continues_is_waited_for_when_it_has_ended": [
        Revert(
            "a read during a write hides the write from the next read",
            Replaces("StreamFence.enter", "self._open.values()", "()"),
        ),
    ],
    "tests/buffers/test_cuda_fence.py::test_memory_that_another_stream_uses_is_not_reused": [
        Revert(
            "memory of the log is reused while another stream reads it",
            Loses("StreamFence.enter", "record_stream(...)"),
        ),
    ],
    "tests/tracker/test_rank_counters.py::test_the_totals_are_the_same_at_any_number_of_ranks[4-2]": [
        Revert(
            "every rank loads the parts of all ranks",
            Replaces("counted_by", "range(...)", "range(parts[0].world_size)"),
        ),
    ],
    "tests/tracker/test_rank_counters.py::test_the_totals_are_the_same_at_any_number_of_ranks[1-4]": [
        Revert(
            "a rank without a part has an empty list, for which torchmetrics waits for ever",
            Replaces("CounterSet.merged", "isinstance(...)", "False"),
        ),
    ],
    "tests/tracker/test_rank_counters.py::test_the_totals_are_the_same_at_any_number_of_ranks[2-2]": [
        Revert(
            "a merged save has the states of rank 0 only",
            Replaces(
                "RankCounters.state_dict",
                "parse_all(...)",
                "_[:1]",
            ),
        ),
    ],
    "tests/tracker/test_kinds.py::test_random_kinds_are_tracked_exactly_or_refused": [
        Revert(
            "a subclass of a sharded collection is skipped",
            Returns("Torchrec.holder", "self.collections.get(type(module))"),
            Loses("sharding.discover.discover", "UnsupportedModelError(...)", nth=1),
            Loses("sharding.discover.discover", "UnsupportedModelError(...)"),
        ),
        Revert(
            "sharded modules that are no collection are skipped",
            Loses("sharding.discover.discover", "UnsupportedModelError(...)", nth=1),
            Loses("sharding.discover.discover", "UnsupportedModelError(...)"),
        ),
        Revert(
            "recorded lookups replace the comparison of dense tables",
            Replaces(
                "ModelDeltaTracker._make_stores",
                "make_store(...)",
                "SegmentStore(self._model.shards[fqn].spec.num_rows, self._model.shards[fqn].device)"
                " if self._records_lookups and not self._model.shards[fqn].is_fused else _",
            ),
        ),
        Revert("optimizers that write outside the backward pass are accepted", DoesNothing("_refuse_optimizers")),
        Revert("pruning is accepted", DoesNothing("_refuse_pruning")),
    ],
    "tests/tracker/test_segments.py::test_random_schedules_agree_with_the_reference": [
        Revert("a cut does not mark open rows again"),
        Revert("a read that raised keeps its cut"),
        Revert("batches of backward passes that raised stay open"),
        Revert("in-place writes to weights are not seen at a cut"),
        Revert("weights that were written to in place are taken for old rows"),
    ],
    "tests/tracker/test_tracker.py::test_schedules_include_reads_inside_a_backward": [
        Revert("what top-k left out is kept in the caller's tensors", Replaces("Delta.left_out", "_.copy()", "_")),
        Revert("weights that are loaded or edited in place are not watched"),
        Revert("a delta holds the carried rows themselves"),
        Revert("a score works on the rows of the delta"),
    ],
    "tests/tracker/test_old_states.py::test_states_in_small_blocks_with_late_copies_are_the_same": [
        Revert("the number of rows in a block is taken from a copy that is not complete"),
        Revert("rows that were appended while their number was copied are overwritten"),
        Revert("spilled states are released before they are copied"),
    ],
    "tests/tracker/test_old_states.py::test_states_are_right_in_any_order_of_the_copies_and_the_training": [
        Revert(
            "old states are copied to the host before they are on the device",
            Loses("HostCopy._start", "wait_stream(...)"),
        ),
        Revert(
            "a copy on the host is read before its event",
            Replaces("HostCopy.is_done", "bool(...)", "True"),
            Loses("HostCopy.result", "synchronize(...)"),
        ),
    ],
    "tests/tracker/test_owner_store.py::test_each_consumer_gets_the_owners_of_its_own_last_read": [
        Revert("all consumers share one former owner of a row"),
        Revert("a new owner does not mark its row"),
        Revert("the former owner of a row is read after the module changed it"),
        Revert("doubted rows of a consumer lose their former owners"),
        Revert("a consumer that is rewound gets the former owners of another consumer"),
    ],
    "tests/contract/test_row_sets.py::test_an_interrupt_after_a_loop_loses_no_row": [
        Revert(
            "after an interrupt, a cleared set still has its former number of rows",
            Loses("NumbaRows.clear", "self._is_summarized"),
        ),
    ],
}
