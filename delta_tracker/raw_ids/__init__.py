"""Mappings from raw ids to the rows of tables with managed collisions. This package does not require torchrec.

Open ``raw_id_map.py`` first: it assigns raw ids to buckets, checks the owners of rows, and defines :class:`RawIdMap`,
the interface of a live mapping. ``index.py`` contains a mapping for serving code. In other packages,
``sharding/raw_id_maps.py`` and ``sharding/collisions.py`` change and read the mappings of TorchRec's modules,
``sharding/collision_states.py`` saves and restores their training states, ``tracker/store/owner_store.py`` finds the
rows whose owner changed, and ``predictor/identities.py`` applies the owners of a version.
"""

from delta_tracker.raw_ids.raw_id_map import NO_OWNER as NO_OWNER
from delta_tracker.raw_ids.raw_id_map import RawIdMap as RawIdMap
from delta_tracker.raw_ids.raw_id_map import bucket_of as bucket_of
from delta_tracker.raw_ids.raw_id_map import check_owners as check_owners
from delta_tracker.raw_ids.raw_id_map import check_unique as check_unique
from delta_tracker.raw_ids.raw_id_map import default_rows as default_rows
from delta_tracker.raw_ids.raw_id_map import defaults_of as defaults_of
