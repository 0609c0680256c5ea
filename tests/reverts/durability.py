"""Fixes of what a power loss, a store on the way, or an entry that breaks a rule does to a stream."""

from __future__ import annotations

from tests.reverts.revert import Revert

REVERTS = [
    Revert(
        defect="a power loss finds entries whose parts retention deleted",
        generator="tests/system/test_power_loss.py::test_a_power_loss_at_any_call_loses_no_acknowledged_version",
        edits={
            "delta_tracker/stream/maintenance/retention.py": [
                ("    if gone:\n        _sync_entries(log.storage)\n", ""),
            ],
        },
    ),
    Revert(
        defect="a power loss takes a version whose sync failed and that was read back",
        generator="tests/system/test_power_loss.py::test_a_power_loss_after_a_failed_sync_loses_no_acknowledged_version",
        edits={
            "delta_tracker/stream/log.py": [
                (
                    "        except (NameConflictError, NotDurableError, DirectoryReplacedError):\n",
                    "        except NameConflictError:\n",
                ),
                ('        self.storage.sync(name.rpartition("/")[0])\n', ""),
            ],
        },
    ),
    Revert(
        defect="the name of a version is not synced",
        generator="tests/system/test_power_loss.py::test_a_power_loss_at_any_call_loses_no_acknowledged_version",
        edits={
            "delta_tracker/stream/storage/local.py": [
                ("    for path in (Path(name), *Path(name).parents):\n", "    for path in Path(name).parents:\n"),
            ],
        },
    ),
    Revert(
        defect="an entry that was altered on the way is acknowledged",
        generator="tests/system/test_s3.py::test_an_entry_that_was_altered_on_the_way_is_not_acknowledged",
        edits={
            "delta_tracker/stream/log.py": [
                ("        if created and not self.storage.is_remote:\n", "        if created:\n"),
            ],
        },
    ),
    Revert(
        defect="a store that alters every write gets a hundred claims",
        generator="tests/stream/test_log.py::test_a_claim_in_a_store_that_alters_every_write_ends_after_three",
        edits={
            "delta_tracker/stream/log.py": [
                ("                if num_altered == _ALTERATIONS:\n                    raise\n", ""),
            ],
        },
    ),
    Revert(
        defect="after an altered entry, a delta follows that readers cannot reach",
        generator="tests/publisher/test_publisher.py::test_after_an_entry_that_the_store_altered_a_snapshot_follows",
        edits={
            "delta_tracker/publisher/publisher.py": [
                (" or self._writer.needs_snapshot\n                wants", "\n                wants"),
            ],
        },
    ),
    Revert(
        defect="a generation that falls is applied",
        generator="tests/stream/test_format_rules.py::test_a_generation_that_falls_is_not_applied",
        edits={
            "delta_tracker/stream/cursor.py": [
                ("            or manifest.generation < generation\n", ""),
            ],
        },
    ),
]
