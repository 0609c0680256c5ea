"""Rules of counters that are saved without a tracker."""

from __future__ import annotations

from tests.reverts.revert import Revert

_COUNTERS = "delta_tracker/tracker/checkpoint/counters.py"
_SET = "delta_tracker/tracker/checkpoint/counter_set.py"
_RANK_COUNTERS = "delta_tracker/tracker/checkpoint/rank_counters.py"
_DCP = "delta_tracker/integrations/dcp.py"
_CALLBACK = "delta_tracker/integrations/lightning_counters.py"
_TESTS = "tests/tracker/test_rank_counters.py"
_TOTALS = f"{_TESTS}::test_the_totals_are_the_same_at_any_number_of_ranks"
_REFUSED = f"{_TESTS}::test_what_cannot_be_exact_is_refused_by_name"
_LIGHTNING = "tests/integrations/test_lightning_counters.py"


def _revert(defect: str, generator: str, file: str, before: str, after: str) -> Revert:
    return Revert(defect=defect, generator=generator, edits={file: [(before, after)]})


REVERTS = [
    _revert(
        "every rank loads the parts of all ranks",
        f"{_TOTALS}[4-2]",
        _SET,
        "mine = range(rank, parts[0].world_size, world_size)",
        "mine = range(parts[0].world_size)",
    ),
    _revert(
        "a rank without a part has an empty list, for which torchmetrics waits for ever",
        f"{_TOTALS}[1-4]",
        _COUNTERS,
        "return counter.new_state(layouts) if isinstance(counter, _Metric) else counter.merge([])",
        "return counter.merge([])",
    ),
    _revert(
        "a part that this rank loads is missing without a word",
        _REFUSED,
        _SET,
        'raise PartialStateError("counters are missing", missing)',
        "pass",
    ),
    _revert(
        "a merged save has the states of rank 0 only",
        f"{_TOTALS}[2-2]",
        _RANK_COUNTERS,
        "self._counters.merged(parts, parts, gathered)",
        "self._counters.merged(parts[:1], parts, gathered)",
    ),
    _revert(
        "a synchronized metric is saved on every rank",
        _REFUSED,
        _COUNTERS,
        "if self._metric._is_synced:  # noqa: SLF001",
        "if False:",
    ),
    _revert(
        "a checkpoint without counters is loaded as if it had some",
        _REFUSED,
        _RANK_COUNTERS,
        'raise PartialStateError("it has no counters").advising(remedy)',
        "return CounterPlan([])",
    ),
    _revert(
        "counters and a tracker in one checkpoint are taken for each other",
        f"{_TESTS}::test_a_checkpoint_has_a_tracker_and_counters",
        _DCP,
        "if all(map(self._is_wanted, _parsed(headers)))",
        "if headers",
    ),
    _revert(
        "the callback saves the part of rank 0 only",
        f"{_LIGHTNING}::test_the_totals_are_the_same_at_another_number_of_ranks",
        _CALLBACK,
        'checkpoint[_KEY] = self._counters.state_dict(strategy="gather_or_local")',
        "checkpoint[_KEY] = self._counters.state_dict()",
    ),
    _revert(
        "one rank loads counters although another cannot",
        f"{_LIGHTNING}::test_checkpoints_that_do_not_fit_are_refused_on_every_rank",
        _CALLBACK,
        "            self._counters.check(saved)\n",
        "            pass\n",
    ),
]
