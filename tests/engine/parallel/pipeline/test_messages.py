"""Messages between two stages on gloo: values of any dtype and shape, one message where nothing changes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ds_hf.config.types.root import MeshShape
from ds_hf.engine.comm.mesh import Mesh
from ds_hf.engine.parallel.pipeline.messages import Links
from tests.helpers.distributed import run_distributed


def values() -> list[Any]:
    """Of five messages; the second and the fifth are like those before them."""
    hidden = torch.randn(2, 3, 4).transpose(1, 2).requires_grad_()
    rest = (torch.randn(3, dtype=torch.bfloat16), torch.tensor(5), torch.tensor([True, False, True]), torch.empty(0, 4))
    double = torch.randn(2, 1, dtype=torch.complex64)
    return [(hidden, *rest), (hidden * 2, *rest), hidden[:1], double, double + 1]


def _send(mesh_of: Any) -> Any:
    torch.manual_seed(3)
    links = Links(mesh_of(), torch.device("cpu"), 1)
    if (after := links.after[0]) is not None:
        for value in values():
            after.send(value)
        links.settle()
        return [entry[:3] for entry in links.log.entries]
    before, found = links.before[0], []
    assert before is not None
    for _ in values():
        before.expect()
        found.append(before.receive())
    kept = [([tensor.detach().clone() for tensor in listed(each.value)], len(each.leaves)) for each in found]
    return kept, _versions(found[0].value)


def _mesh() -> Mesh:
    return Mesh(MeshShape(pipe=2))


def _versions(value: tuple[Tensor, ...]) -> list[int]:
    """Of all tensors after the third changed in place: others that were saved for backward must not look changed."""
    value[2].add_(1)
    return [tensor._version for tensor in value]


def listed(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else list(value)


def test_what_is_sent_arrives_in_one_message() -> None:
    sent, (received, versions) = run_distributed(_send, 2, _mesh, timeout=20)
    torch.manual_seed(3)
    for wanted, (tensors, leaves) in zip(values(), received, strict=True):
        assert [(t.dtype, t.shape) for t in tensors] == [(t.dtype, t.shape) for t in listed(wanted)]
        assert all(torch.equal(one, other) for one, other in zip(tensors, listed(wanted), strict=True))
        assert leaves == sum(tensor.requires_grad for tensor in listed(wanted))
    assert versions == [0, 0, 1, 0, 0]
    assert len(sent) == 3 + 1 + 3 + 3 + 1  # flag, description and tensors; or all in one
