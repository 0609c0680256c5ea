"""Fixes in the log of changed rows."""

from __future__ import annotations

from tests.reverts.revert import Revert

_OLD_STATES = "delta_tracker/tracker/store/old_states.py"

REVERTS = [
    Revert(
        defect="a load without a state that is interrupted loses the rows of some tables",
        generator="tests/tracker/test_failed_calls.py::test_a_load_without_a_state_that_is_interrupted_loses_no_row",
        edits={
            "delta_tracker/tracker/change_log.py": [
                (
                    "                    self.mark(fqn, None, is_written=True)\n            except BaseException:",
                    "                    self.mark(fqn, None, is_written=True)\n            except ZeroDivisionError:",
                )
            ]
        },
    ),
    Revert(
        defect="a restore that is interrupted leaves rows that are not pending",
        generator="tests/tracker/test_failed_calls.py::test_a_restore_from_a_stream_that_is_interrupted_loses_no_row",
        edits={
            "delta_tracker/tracker/checkpoint/tracker_checkpoint.py": [
                ("                self._log.mark_everything_later()\n", "                pass\n")
            ]
        },
    ),
    Revert(
        defect="the ranks wait for one whose tracker is detached",
        generator="tests/tracker/test_tracker.py::test_all_ranks_report_a_tracker_that_is_detached_on_one",
        timeout_seconds=60.0,
        hangs=True,
        edits={
            "delta_tracker/tracker/checkpoint/tracker_checkpoint.py": [
                (
                    "        failed = [] if group is None else group.all_gather(",
                    "        failed = [] if True else group.all_gather(",
                )
            ]
        },
    ),
    Revert(
        defect="updates after an interrupted reattach are lost",
        generator="tests/tracker/test_failed_calls.py::test_a_reattach_that_fails_detaches_the_tracker",
        edits={
            "delta_tracker/tracker/tracker.py": [
                ("        self._model.is_attached = False  # first", "        # first")
            ]
        },
    ),
    Revert(
        defect="a reattach that fails leaves hooks",
        generator="tests/tracker/test_failed_calls.py::test_a_reattach_that_fails_detaches_the_tracker[watch_syncs-KeyboardInterrupt]",
        edits={
            "delta_tracker/tracker/tracker.py": [
                (
                    (
                        "        except BaseException:\n"
                        "            self._remove_hooks()\n"
                        "            raise\n"
                        "        self._model.is"
                    ),
                    (
                        "        except ZeroDivisionError:\n"
                        "            self._remove_hooks()\n"
                        "            raise\n"
                        "        self._model.is"
                    ),
                )
            ]
        },
    ),
    Revert(
        defect="a load that runs out of memory loses the pending rows",
        generator="tests/tracker/test_failed_calls.py::test_a_load_that_runs_out_of_memory_loses_no_row",
        edits={
            "delta_tracker/tracker/change_log.py": [
                (
                    "consumers, origin)\n            except BaseException:",
                    "consumers, origin)\n            except ZeroDivisionError:",
                )
            ]
        },
    ),
    Revert(
        defect="a detached tracker saves a state without the later updates",
        generator="tests/tracker/test_failed_calls.py::test_a_detached_tracker_has_no_state",
        edits={
            "delta_tracker/tracker/checkpoint/tracker_checkpoint.py": [
                ("            self._model.check_attached()\n", "            pass\n")
            ]
        },
    ),
    Revert(
        defect="an interrupted release of a consumer cannot be repeated",
        generator="tests/tracker/test_failed_calls.py::test_an_interrupted_release_can_be_repeated",
        edits={
            "delta_tracker/tracker/consumer_handle.py": [
                (
                    "        if not self._is_transient:\n            self._log.release(self._name)\n",
                    (
                        "        self._is_released = True\n"
                        "        if not self._is_transient:\n"
                        "            self._log.release(self._name)\n"
                    ),
                )
            ]
        },
    ),
    Revert(
        defect="recorded embeddings of a wrong width mark some rows",
        generator="tests/tracker/test_failed_calls.py::test_embeddings_of_a_wrong_width_are_refused_before_a_row_is_marked",
        edits={
            "delta_tracker/tracker/lookup_recorder.py": [
                (
                    "                    looked_up.append((fqn, ids, None if states is None else states[rows]))\n",
                    (
                        "                    looked_up.append((fqn, ids, None if states is None else states[rows]))\n"
                        "                    self._log.mark(fqn, ids)\n"
                    ),
                )
            ]
        },
    ),
    Revert(
        defect="ids of the host are marked on a device",
        generator="tests/gpu/test_stores.py::test_ids_of_the_host_are_rows_of_the_device",
        edits={
            "delta_tracker/tracker/store/segments.py": [("rows.mark(to_device(ids, self._device))", "rows.mark(ids)")]
        },
    ),
    Revert(
        defect="a reservation that ended before its consumer was added fails the next call of the tracker",
        generator="tests/tracker/test_change_log.py::test_a_reserved_consumer_that_was_never_added_is_ignored",
        edits={
            "delta_tracker/tracker/consumer_positions.py": [
                (
                    "        consumer = self._consumers.get(name)\n        if consumer is None:\n            return\n",
                    "        consumer = self._consumers[name]\n",
                ),
            ],
        },
    ),
    Revert(
        defect="a tracker that cannot be attached again, because memory is missing, has lost its hooks",
        generator="tests/tracker/test_flows.py::test_a_table_that_torchrec_moved",
        edits={
            "delta_tracker/tracker/tracker.py": [
                (
                    "        known = self._model.found\n",
                    "        known = self._model.found\n        self._remove_hooks()\n",
                ),
            ],
        },
    ),
    Revert(
        defect="Triton compiles its kernels in a backward pass",
        generator="tests/contract/test_row_sets.py::test_the_engine_is_warm_before_the_first_set",
        edits={
            "delta_tracker/tracker/store/segments.py": [
                ("        self.engine.warm_up(self._device)  # the first set is created in a backward pass\n", ""),
            ],
        },
    ),
    Revert(
        defect="a cut does not mark open rows again",
        generator="tests/tracker/test_segments.py::test_random_schedules_agree_with_the_reference",
        edits={
            "delta_tracker/tracker/store/segments.py": [
                ("        for ids in self._open.values():\n            self._mark(ids)\n", ""),
            ],
        },
    ),
    Revert(
        defect="a read that raised keeps its cut",
        generator="tests/tracker/test_segments.py::test_random_schedules_agree_with_the_reference",
        edits={
            "delta_tracker/tracker/change_log.py": [
                ("            self._tidy(self.compact)\n\n    def seal(", "            pass\n\n    def seal("),
            ],
        },
    ),
    Revert(
        defect="batches of backward passes that raised stay open",
        generator="tests/tracker/test_segments.py::test_random_schedules_agree_with_the_reference",
        edits={"delta_tracker/tracker/change_log.py": [("        self._ended.append(key)\n", "        del key\n")]},
    ),
    Revert(
        defect="in-place writes to weights are not seen at a cut",
        generator="tests/tracker/test_segments.py::test_random_schedules_agree_with_the_reference",
        edits={
            "delta_tracker/tracker/change_log.py": [
                (
                    "        self.notice_writes(self._stores)\n        with self._reading_shards():\n",
                    "        with self._reading_shards():\n",
                ),
            ],
        },
    ),
    Revert(
        defect="weights that were written to in place are taken for old rows",
        generator="tests/tracker/test_segments.py::test_random_schedules_agree_with_the_reference",
        edits={
            "delta_tracker/tracker/change_log.py": [
                ("self._notice_before_capture(ids)\n            self._open[key]", "self._open[key]"),
            ],
        },
    ),
    Revert(
        defect="weights that are loaded or edited in place are not watched",
        generator="tests/tracker/test_tracker.py::test_schedules_include_reads_inside_a_backward",
        edits={
            "delta_tracker/tracker/store/make_store.py": [
                ("was_written=WriteWatch(shard)", "was_written=None"),
            ],
        },
    ),
    Revert(
        defect="a delta holds the carried rows themselves",
        generator="tests/tracker/test_tracker.py::test_schedules_include_reads_inside_a_backward",
        edits={
            "delta_tracker/tracker/delta_reader.py": [
                ("                sent = sent.copy(new_rows)\n", "                pass\n"),
            ],
        },
    ),
    Revert(
        defect="a score works on the rows of the delta",
        generator="tests/tracker/test_tracker.py::test_schedules_include_reads_inside_a_backward",
        edits={
            "delta_tracker/tracker/delta_reader.py": [
                ("self._rows(fqn, changed.copy(new_rows), with", "self._rows(fqn, changed, with"),
            ],
        },
    ),
    Revert(
        defect="what top-k left out is kept in the caller's tensors",
        generator="tests/tracker/test_tracker.py::test_schedules_include_reads_inside_a_backward",
        edits={
            "delta_tracker/types.py": [
                ("{fqn: rows.copy() for fqn, rows in self.kept.items()}", "dict(self.kept)"),
            ],
        },
    ),
    Revert(
        defect="in-place writes are forgotten if memory runs out while they are marked",
        generator="tests/tracker/test_change_log.py::test_writes_not_marked_for_lack_of_memory_are_marked_by_the_next_call",
        edits={
            "delta_tracker/tracker/store/segments.py": [
                (
                    "                if self._was_written():\n                    self._has_unmarked = True\n",
                    "                return self._was_written()\n",
                )
            ]
        },
    ),
    Revert(
        defect="a read that has committed its rows raises",
        generator="tests/tracker/test_change_log.py::test_a_commit_succeeds_where_memory_runs_out_after_it",
        edits={
            "delta_tracker/tracker/change_log.py": [
                (
                    "self._consumers.advance(delta)\n            self._tidy(*tasks)\n",
                    "self._consumers.advance(delta)\n            [task() for task in tasks]\n",
                )
            ]
        },
    ),
    Revert(
        defect="a tracker that detaches empties the buffer pool of the other trackers",
        generator="tests/tracker/test_tracker.py::test_a_tracker_that_detaches_leaves_the_memory_of_others_alone",
        edits={"delta_tracker/tracker/tracker.py": [("        MEMORY.leave(self)\n", "        MEMORY.give_back()\n")]},
    ),
    Revert(
        defect="rank 1 saves nothing if a Lightning strategy saves on every rank",
        generator="tests/integrations/test_lightning.py::test_each_rank_continues_with_its_own_states",
        edits={
            "delta_tracker/integrations/lightning.py": [
                ('state_dict(strategy="gather_or_local")', 'state_dict(strategy="gather")'),
            ],
        },
    ),
    Revert(
        defect="the rows of the last batches of a Lightning fit are not published",
        generator="tests/integrations/test_lightning.py::test_the_last_rows_are_published_and_saved_after_fit",
        edits={
            "delta_tracker/integrations/lightning.py": [("            publisher.publish()\n", "            pass\n")],
        },
    ),
    Revert(
        defect="a Lightning fit after one that raised leaves the first tracker attached",
        generator="tests/integrations/test_lightning.py::test_a_fit_after_an_error_releases_the_first_tracker",
        edits={
            "delta_tracker/integrations/lightning.py": [
                ("        self._release()  # what a fit that raised has left\n", ""),
            ],
        },
    ),
    Revert(
        defect="a Lightning checkpoint encodes the state of rank 1 twice",
        generator="tests/integrations/test_lightning.py::test_each_rank_encodes_its_state_once_for_a_checkpoint",
        edits={
            "delta_tracker/integrations/lightning.py": [
                (
                    'state_dict(strategy="gather_or_local")',
                    'state_dict(strategy="gather") or self.tracker.state_dict()',
                ),
            ],
        },
    ),
    Revert(
        defect="a row that a search of Lightning has published keeps the value of the search",
        generator="tests/integrations/test_lightning.py::test_rows_that_are_read_during_a_search_are_read_again",
        edits={
            "delta_tracker/integrations/lightning.py": [
                ("        _mark_everything(self.tracker)  # a consumer may", "        # a consumer may"),
            ],
        },
    ),
    Revert(
        defect="a write through .data in a hook of a step is taken for the step's own",
        generator="tests/sharding/test_named_writers.py::test_a_copy_in_a_hook_of_a_step_is_published",
        edits={"delta_tracker/sharding/step_hook.py": [(".weight._version + named for", ".weight._version for")]},
    ),
    Revert(
        defect="ranks that build different trackers train",
        generator="tests/integrations/test_lightning.py::test_ranks_that_disagree_are_refused_before_training",
        edits={
            "delta_tracker/tracker/checkpoint/agreement.py": [
                ("            if value != results[0][what]:", "            if False:"),
            ],
        },
        timeout_seconds=300.0,
        hangs=True,
    ),
    Revert(
        defect="the state of another metric is loaded as 0",
        generator="tests/tracker/test_rank_states.py::test_a_counter_that_was_not_saved_is_refused_and_nothing_is_loaded",
        edits={
            "delta_tracker/tracker/checkpoint/counters.py": [
                ("            if kind.get(key) != mine.get(key):", "            if False:"),
            ],
        },
    ),
    Revert(
        defect="the name of a reduction differs between processes",
        generator="tests/tracker/test_rank_states.py::test_a_counter_of_the_same_kind_is_loaded_in_another_process_and_after_updates",
        edits={
            "delta_tracker/tracker/checkpoint/counters.py": [
                (
                    "            field: _reduction_name(reduction)\n",
                    '            field: getattr(reduction, "__name__", str(reduction))\n',
                ),
            ],
        },
    ),
    Revert(
        defect="a metric whose updates change a buffer is refused",
        generator="tests/tracker/test_rank_states.py::test_a_counter_of_the_same_kind_is_loaded_in_another_process_and_after_updates",
        edits={
            "delta_tracker/tracker/checkpoint/counters.py": [
                ("        return self._kind\n", "        return self._current_kind()\n"),
            ],
        },
    ),
    Revert(
        defect="the length of a saved list is not checked before its fields are listed",
        generator="tests/tracker/test_rank_states.py::test_a_list_that_is_longer_in_the_header_than_in_the_part_is_refused_at_once",
        edits={
            "delta_tracker/tracker/checkpoint/counters.py": [
                ("                if length > len(fields):", "                if False:")
            ],
        },
    ),
    Revert(
        defect="a counter that fails to load leaves the others loaded",
        generator="tests/tracker/test_rank_states.py::test_a_counter_that_was_not_saved_is_refused_and_nothing_is_loaded",
        edits={
            "delta_tracker/tracker/checkpoint/counters.py": [
                ("            counters[name].load_state_dict(before[name])\n", "            pass\n"),
            ],
        },
    ),
    Revert(
        defect="states that cannot be merged are loaded at another world size",
        generator="tests/tracker/test_rank_states.py::test_states_that_cannot_be_merged_need_the_number_of_ranks_that_saved",
        edits={
            "delta_tracker/tracker/checkpoint/counters.py": [
                ("    if unmerged and saved != found:", "    if False:"),
            ],
        },
    ),
    Revert(
        defect="a tracker that was deleted stays in memory",
        generator="tests/tracker/test_tracker.py::test_a_tracker_that_is_deleted_leaves_no_hooks_and_no_log",
        timeout_seconds=240.0,
        edits={
            "delta_tracker/tracker/tracker.py": [
                ("weakref.finalize(self, _remove, hooks)", "weakref.finalize(self, list)")
            ]
        },
    ),
    Revert(
        defect="a tracker whose consumer is reserved stops to record when it is deleted",
        generator="tests/tracker/test_tracker.py::test_a_tracker_that_is_deleted_leaves_no_hooks_and_no_log",
        timeout_seconds=240.0,
        edits={
            "delta_tracker/tracker/consumer_handle.py": [
                ("        self._tracker = tracker\n", "        self._tracker = None\n"),
                ("= lookups_in_flight\n", "= lambda: 0\n"),  # a method of the tracker
            ]
        },
    ),
    Revert(
        defect="the consumer of a publisher that was deleted stays reserved",
        generator="tests/publisher/test_publisher.py::test_a_publisher_that_is_deleted_frees_its_consumer_and_threads",
        timeout_seconds=240.0,
        edits={
            "delta_tracker/tracker/consumer_handle.py": [("    abandoned.append(consumer)\n", "    del abandoned\n")]
        },
    ),
    Revert(
        defect="a publisher that was deleted leaves its stream position to the consumer's next owner",
        generator="tests/publisher/test_publisher.py::test_a_publisher_that_is_deleted_frees_its_consumer_and_threads",
        timeout_seconds=240.0,
        edits={"delta_tracker/tracker/consumer_handle.py": [("        notes[name] = None\n", "        pass\n")]},
    ),
    Revert(
        defect="the only consumer needs a name while a publisher copies a snapshot",
        generator="tests/tracker/test_change_log.py::test_the_only_consumer_needs_no_name_while_a_snapshot_is_copied",
        edits={
            "delta_tracker/tracker/consumer_positions.py": [
                ("self._consumers.items() if not consumer.is_transient]", "self._consumers.items()]")
            ]
        },
    ),
    Revert(
        defect="a block of old states on a device keeps its padding",
        generator="tests/tracker/test_old_states.py::test_blocks_are_trimmed_to_their_rows",
        edits={
            _OLD_STATES: [
                ("            if not self.is_open and lowest < _FULL * len(self._ids):", "            if False:")
            ]
        },
    ),
    Revert(
        defect="old states on a device reserve memory for more rows than the table has",
        generator="tests/tracker/test_segments.py::test_old_states_on_a_device_take_the_memory_of_their_rows",
        edits={
            _OLD_STATES: [("Block(min(capacity, self._num_rows - known), ids, states)", "Block(capacity, ids, states)")]
        },
    ),
    Revert(
        defect="a read waits once for each block of old states on a device",
        generator="tests/tracker/test_old_states.py::test_blocks_are_trimmed_to_their_rows",
        edits={
            _OLD_STATES: [
                ("torch.cat([block.count for block in blocks]).tolist()", "[int(block.count) for block in blocks]"),
            ]
        },
    ),
    Revert(
        defect="old states stay on the device whatever they take",
        generator="tests/tracker/test_old_states.py::test_old_blocks_are_spilled",
        edits={"delta_tracker/tracker/store/segments.py": [("            left -= states.spill(max(0, left))\n", "")]},
    ),
    Revert(
        defect="the number of rows in a block is taken from a copy that is not complete",
        generator="tests/tracker/test_old_states.py::test_states_in_small_blocks_with_late_copies_are_the_same",
        edits={
            _OLD_STATES: [
                ("        if self._copy is not None and self._copy.is_done:", "        if self._copy is not None:")
            ]
        },
    ),
    Revert(
        defect="rows that were appended while their number was copied are overwritten",
        generator="tests/tracker/test_old_states.py::test_states_in_small_blocks_with_late_copies_are_the_same",
        edits={_OLD_STATES: [("min(self.highest, lowest + since)", "lowest")]},
    ),
    Revert(
        defect="spilled states are released before they are copied",
        generator="tests/tracker/test_old_states.py::test_states_in_small_blocks_with_late_copies_are_the_same",
        edits={_OLD_STATES: [("self._states is not None and self._spilled.is_done:", "self._states is not None:")]},
    ),
    Revert(
        defect="memory that old states reserve drops a consumer",
        generator="tests/tracker/test_old_states.py::test_memory_for_further_states_is_released_before_a_consumer_is_dropped",
        edits={
            "delta_tracker/tracker/store/segments.py": [("            states.shrink()\n", "            del states\n")]
        },
    ),
    Revert(
        defect="a comparison with the copy of a table waits once for each chunk",
        generator="tests/tracker/test_shadow.py::test_a_comparison_on_a_device_waits_once_for_any_number_of_chunks",
        edits={
            "delta_tracker/tracker/store/shadow.py": [
                (
                    "        changed = differs.nonzero().flatten()",
                    "        changed = torch.cat([e.nonzero()[:, 0] + 4 * n for n, e in enumerate(differs.split(4))])",
                ),
            ]
        },
    ),
    Revert(
        defect="top-k on a device waits for each table",
        generator="tests/tracker/test_top_k.py::test_a_choice_on_a_device_waits_equally_often_for_any_number_of_tables",
        edits={
            "delta_tracker/tracker/top_k.py": [
                ('_HostKeys if table.scores.device.type == "cpu" else _DeviceKeys', "_HostKeys"),
            ]
        },
    ),
    Revert(
        defect="old states are copied to the host before they are on the device",
        generator="tests/tracker/test_old_states.py::test_states_are_right_in_any_order_of_the_copies_and_the_training",
        edits={"delta_tracker/host_copy.py": [("            stream.wait_stream(current)\n", "")]},
    ),
    Revert(
        defect="a copy on the host is read before its event",
        generator="tests/tracker/test_old_states.py::test_states_are_right_in_any_order_of_the_copies_and_the_training",
        edits={
            "delta_tracker/host_copy.py": [
                ("if self.copied is None else bool(self.copied.query())", "if self.copied is None else True"),
                ("            self.copied.synchronize()\n", "            pass\n"),
            ]
        },
    ),
    Revert(
        defect="the ids of failed backward passes are counted in a hook, which waits for the device",
        generator="tests/tracker/test_segments.py::"
        "test_backward_passes_that_raised_on_a_device_do_not_make_training_wait",
        edits={"delta_tracker/tracker/store/segments.py": [("        if not self.pads:\n", "        if True:\n")]},
    ),
    Revert(
        defect="the ids of failed backward passes take more memory than one id for each row",
        generator="tests/tracker/test_segments.py::"
        "test_backward_passes_that_raised_on_a_device_do_not_make_training_wait",
        edits={"delta_tracker/tracker/store/segments.py": [("        padded = padded[: self.num_rows]\n", "")]},
    ),
    Revert(
        defect="the writes of a restore from a stream mark all rows",
        generator="tests/tracker/test_checkpoint.py::test_rows_that_a_stream_restored_are_not_pending",
        edits={
            "delta_tracker/tracker/store/segments.py": [
                ("        self.acknowledge_writes()\n        self._has_unmarked = False\n", ""),
            ],
            "delta_tracker/tracker/change_log.py": [
                (
                    "                self._cut()\n                self._consumers.restore(",
                    "                self._consumers.restore(",
                ),
            ],
        },
    ),
    Revert(
        defect="all consumers share one former owner of a row",
        generator="tests/tracker/test_owners.py::test_each_consumer_gets_the_owners_of_its_own_last_read",
        edits={
            "delta_tracker/tracker/store/owners.py": [
                ("self.changed(start, self._seg", "self.changed(self._segments[-1].start - 1, self._seg"),
            ],
        },
    ),
    Revert(
        defect="a new owner does not mark its row",
        generator="tests/tracker/test_owners.py::test_each_consumer_gets_the_owners_of_its_own_last_read",
        edits={"delta_tracker/tracker/store/owners.py": [("            mark(changed)\n", "")]},
    ),
    Revert(
        defect="the former owner of a row is read after the module changed it",
        generator="tests/tracker/test_owners.py::test_each_consumer_gets_the_owners_of_its_own_last_read",
        edits={
            "delta_tracker/tracker/store/owners.py": [
                ("self._owners.index_select(0, ids).unsqueeze(1)", "source.read().index_select(0, ids).unsqueeze(1)"),
            ],
        },
    ),
    Revert(
        defect="top-k leaves out a row with a new owner",
        generator="tests/tracker/test_top_k.py::test_rows_with_another_raw_id_are_never_left_out",
        edits={
            "delta_tracker/tracker/delta_reader.py": [
                ("is_due |= changed.former != self._log.owners_of(fqn, changed.ids)\n", "pass\n"),
            ],
        },
    ),
    Revert(
        defect="doubted rows of a consumer lose their former owners",
        generator="tests/tracker/test_owners.py::test_each_consumer_gets_the_owners_of_its_own_last_read",
        edits={"delta_tracker/tracker/change_log.py": [("if fqn in self._owners and knows_owners:", "if False:")]},
    ),
    Revert(
        defect="unknown former owners are the owners now, so that top-k leaves rows with other owners out",
        generator="tests/tracker/test_owners.py::test_unknown_owners_are_none",
        edits={
            "delta_tracker/tracker/store/owners.py": [("states=torch.full_like(every, NO_OWNER).unsqueeze(1)", "")],
        },
    ),
    Revert(
        defect="an owner that a stream cannot have stops training",
        generator="tests/tracker/test_owners.py::test_invalid_owners_are_refused_at_reads_and_do_not_stop_training",
        edits={
            "delta_tracker/tracker/change_log.py": [
                ("                self._check_owners()\n", ""),
                (
                    "            self._position += 1\n            self._is",
                    "            self._check_owners()\n            self._position += 1\n            self._is",
                ),
            ],
        },
    ),
    Revert(
        defect="a checkpoint loses the former owners of pending rows",
        generator="tests/tracker/test_owners.py::test_a_checkpoint_keeps_the_former_owners",
        edits={"delta_tracker/tracker/checkpoint/pack.py": [("if rows.former is not None:", "if False:")]},
    ),
    Revert(
        defect="the buckets of raw ids are those of the checkpoint that a module loaded",
        generator="tests/sharding/test_collisions.py::test_the_buckets_are_those_of_the_plan",
        edits={
            "delta_tracker/sharding/collisions.py": [
                (
                    "edges = sorted({0, *(row + num_rows for row, _, num_rows, _ in blocks)})",
                    "edges = [each for each in module._output_segments_tensor.tolist() if each >= 0]",
                ),
            ],
        },
    ),
    Revert(
        defect="a consumer that is rewound gets the former owners of another consumer",
        generator="tests/tracker/test_owners.py::test_each_consumer_gets_the_owners_of_its_own_last_read",
        edits={
            "delta_tracker/tracker/change_log.py": [
                ("None if self._delete_on_read else unknown)", "None if self._delete_on_read else rows)"),
            ],
        },
    ),
    Revert(
        defect="after an interrupt, a cleared set still has its former number of rows",
        generator="tests/contract/test_row_sets.py::test_an_interrupt_after_a_loop_loses_no_row",
        edits={
            "delta_tracker/tracker/row_sets/numba.py": [
                ("        self._is_settled = False\n        self._loops.clear(", "        self._loops.clear("),
            ],
        },
    ),
]
