"""Rows that are encoded or decoded on the device have the bytes of the CPU."""

from __future__ import annotations

import pytest
import torch

from delta_tracker.stream.format.codec import decode_rows, encode_rows
from delta_tracker.stream.format.encoding import Encoding
from tests.gpu.devices import KIND, OF_MODULES, device

# The quantizing encodings write into given memory and view its bits, which the simulated device does not support.
_DEVICE = OF_MODULES if KIND == "simulated" else device()


def _rows(dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(150, 64, generator=generator)
    scales = 10.0 ** (torch.rand(150, 64, generator=generator) * 40 - 30)
    bits = torch.randint(-(2**31), 2**31, normal.shape, generator=generator).to(torch.int32).view(torch.float32)
    kinds = [normal, normal * 0.01, normal[:, :1].repeat(1, 64), torch.zeros_like(normal), normal * 3e4, normal * 1e-40]
    kinds += [1 + normal * 1e-6, normal * scales, bits]
    special = normal.clone()
    special[0, 3], special[1, 60], special[2], special[3, 17] = torch.inf, -torch.inf, torch.inf, torch.nan
    special[4, 0], special[4, 1] = 3e38, -3e38
    return torch.cat([*kinds, special]).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("encoding", list(Encoding))
def test_bytes_are_those_of_the_cpu(encoding: Encoding, dtype: torch.dtype) -> None:
    rows = _rows(dtype)
    expected = encode_rows(rows, encoding)
    stored = encode_rows(rows.to(_DEVICE), encoding)
    values = decode_rows(expected, encoding, 64, dtype)
    decoded = decode_rows(expected.to(_DEVICE), encoding, 64, dtype).cpu()
    # The bits of a NaN differ between processors; every row without a NaN must be equal, and a NaN must remain one.
    is_number = ~values.float().isnan().any(dim=1)
    assert int(is_number.sum()) > 1000
    assert torch.equal(stored.cpu()[is_number].view(torch.uint8), expected[is_number].view(torch.uint8))
    assert torch.equal(decoded[is_number].view(torch.uint8), values[is_number].view(torch.uint8))
    assert torch.equal(decoded.float().isnan(), values.float().isnan())
    own = decode_rows(stored, encoding, 64, dtype).cpu()
    assert torch.equal(own.float().isnan(), values.float().isnan())
