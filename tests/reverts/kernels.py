"""Fixes in the hooks of kernels, and in reading the memory of kernels."""

from __future__ import annotations

from tests.reverts.revert import Revert

_HOOKS = "delta_tracker/sharding/kernel_hooks.py"
_TESTS = "tests/sharding/test_kernel_hooks.py"
_CAPTURED = f"{_TESTS}::test_replays_of_a_captured_step_are_not_lost"
_UNTRACED = "delta_tracker/sharding/untraced.py"
_COMPILED = f"{_TESTS}::test_a_compiled_lookup_reports_the_rows_that_change"
_MEMORY = "delta_tracker/sharding/kernel_memory.py"
_IN_PLACE = "tests/sharding/test_kernel_memory.py::test_hooks_read_rows_in_a_cache_without_a_flush"

REVERTS = [
    Revert(
        defect="replays of a captured step are lost",
        generator=_CAPTURED,
        edits={
            _HOOKS: [
                (
                    "        if is_capturing():\n            self._captured()\n            return\n\n        def",
                    "        def",
                )
            ]
        },
    ),
    Revert(
        defect="a captured step is reported once and its replays are lost",
        generator=_CAPTURED,
        edits={
            "delta_tracker/tracker/store/segments.py": [
                ("return self._has_unmarked or bool(self._lost)", "return self._has_unmarked")
            ]
        },
    ),
    Revert(
        defect="compaction is captured into a CUDA graph",
        generator=_CAPTURED,
        edits={"delta_tracker/sharding/odist_hook.py": [("        if not is_capturing():\n", "        if True:\n")]},
    ),
    Revert(
        defect="step() marks rows inside a CUDA graph",
        generator=_CAPTURED,
        edits={"delta_tracker/tracker/change_log.py": [("            if not is_capturing():", "            if True:")]},
    ),
    Revert(
        defect="hooks flush the caches of kernels",
        generator=_IN_PLACE,
        edits={_MEMORY: [("        if not _THREAD.reads_in_place:\n", "        if True:\n")]},
    ),
    Revert(
        defect="hooks read old rows of tables whose new rows are in a cache",
        generator=_IN_PLACE,
        edits={_MEMORY: [("return self._cache.overlay(slot, ids, take_rows", "return (take_rows")]},
    ),
    Revert(
        defect="the memory of a kernel is split again at each read",
        generator="tests/sharding/test_kernel_memory.py::test_a_cut_is_over_with_its_block",
        edits={_MEMORY: [("self._kept = None if sources is None else (views, sources)", "pass")]},
    ),
    Revert(
        defect="views of replaced memory are read",
        generator="tests/sharding/test_kernel_memory.py::test_views_are_split_again_once_their_memory_was_replaced",
        edits={_MEMORY: [(" or tensor.data_ptr() != address", "")]},
    ),
    Revert(
        defect="the compiler traces hooks",
        generator=_COMPILED,
        edits={_UNTRACED: [("torch.compiler.disable(hook)  #", "hook  #")]},
    ),
    Revert(
        defect="all rows of a compiled lookup stay open",
        generator=_COMPILED,
        edits={_HOOKS: [("    if compiled is not None:\n        return compiled\n", "")]},
    ),
    Revert(
        defect="each write of a compiled lookup counts as one that no hook reported",
        generator=_COMPILED,
        edits={
            _HOOKS: [
                (
                    "        elif not update.is_proven:\n            # Compiled",
                    "        elif False:\n            # Compiled",
                )
            ]
        },
    ),
    Revert(
        defect="a hook raises in a graph that must not break",
        generator=f"{_TESTS}::test_a_lookup_in_a_graph_without_breaks_reports_all_rows",
        edits={_UNTRACED: [("torch.compiler.is_dynamo_compiling() and is_omitted()", "False")]},
    ),
    Revert(
        defect="lookups that were compiled with another tracker are lost",
        generator=f"{_TESTS}::test_a_tracker_sees_lookups_that_were_compiled_with_another",
        edits={_UNTRACED: [("        compiler.reset_code_caches()", "        pass")]},
    ),
    Revert(
        defect="the wrapper of torch.compile has a component in names",
        generator="tests/sharding/test_discover.py::test_the_wrapper_of_torch_compile_has_no_component_in_names",
        edits={
            "delta_tracker/sharding/torchrec_api.py": [('**dict.fromkeys(compiled, "_orig_mod"),', "")],
        },
    ),
    Revert(
        defect="the tables of a compiled module are not found",
        generator=f"{_TESTS}::test_changes_of_tables_in_a_compiled_module_are_reported",
        edits={
            "delta_tracker/sharding/torchrec_api.py": [('getattr(module, "_orig_mod", module)', "module")],
        },
    ),
    Revert(
        defect="the launches of a batch grow with the number of tables",
        generator="tests/tracker/test_several_stores.py::test_the_launches_of_a_batch_do_not_grow_with_the_number_of_tables",
        edits={
            "delta_tracker/tracker/store/several_stores.py": [
                ("if own is not None and", "if False and own is not None and")
            ]
        },
    ),
    Revert(
        defect="tables that are marked together exchange the rows that are new",
        generator="tests/tracker/test_several_stores.py::test_each_table_has_the_rows_that_it_has_alone",
        edits={
            "delta_tracker/tracker/row_sets/joint_ids.py": [
                (
                    "torch.where(is_marked, last_key, self.indices + self.sets)",
                    "torch.where(is_marked, last_key, self.indices)",
                )
            ]
        },
    ),
]
