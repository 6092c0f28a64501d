"""What goes through layers while batches run: padding is left out, calls and tied layers add up, ranks agree."""

import itertools

import pytest
import torch
import torch.distributed as distributed
from torch import nn

from secateur import criteria, sparsify
from secateur.evidence import collect
from secateur.targets import find_targets
from support.evidence_models import Language, by_hand, close, cross_entropy, network, pairs
from support.forks import leave_group, on_ranks


def test_padded_tokens_are_left_out():
    model = Language()
    weights = {name: p for name, p in model.named_parameters() if p.dim() == 2}
    padded = {"input_ids": torch.tensor([[1, 2, 3], [4, 0, 0]]), "attention_mask": torch.tensor([[1, 1, 1], [1, 0, 0]])}
    shorter = [{"input_ids": torch.tensor([[1, 2, 3]])}, {"input_ids": torch.tensor([[4]])}]
    words = ["input_norm", "input_mean"]
    found = collect(model, [padded], words, weights=weights)
    expected = collect(model, shorter, words, weights=weights)
    for name, word in itertools.product(weights, words):
        close(found[name][word], expected[name][word])


def test_calls_and_tied_layers_add_up():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(self.a(self.a(x)))

    model, x = Twice(), torch.randn(3, 4)
    a = model.a(x).detach()
    inputs = torch.cat([x, a, model.a(a).detach()])
    found = collect(model, [x], ["input_norm", "grad"], loss=lambda y: y.square().sum())
    assert list(found) == ["a.weight"]
    close(found["a.weight"]["input_norm"][0], inputs.norm(dim=0))
    model(x).square().sum().backward()
    close(found["a.weight"]["grad"], model.a.weight.grad)


def test_a_weight_that_is_two_kinds_of_layer_is_refused():
    model = Language(tied=True)
    batches = [{"input_ids": torch.tensor([[1, 2]]), "labels": torch.tensor([[2, 3]])}]
    weights = {"embed.weight": model.embed.weight}
    with pytest.raises(TypeError, match=r"embed.weight is shared by embed \(Embedding\) and head \(Linear\)"):
        collect(model, batches, "input_norm", weights=weights)
    assert collect(model, batches, "grad", weights=weights)["embed.weight"]["grad"].any()


def on_each_rank(rank, folder):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    words = ["grad", "grad_sq", "input_norm", "input_var", "gram"]
    batches = pairs(4)
    expected = collect(network(), batches, [*words, "hessian_grad", "flow"], loss=cross_entropy)
    replicated = nn.parallel.DistributedDataParallel(network())
    # uneven: three batches here, one there
    mine = batches[:3] if rank == 0 else batches[3:]
    found = collect(replicated, mine, [*words, "hessian_grad", "flow"], loss=cross_entropy)
    for name, entry in expected.items():
        for word, tensor in entry.items():
            close(found[f"module.{name}"][word], tensor)
    close(collect(replicated.module, mine, "gram")["0.weight"]["gram"], expected["0.weight"]["gram"])
    x, y = batches[0]
    cross_entropy(replicated(x), y).backward()  # the wrapper works as before
    close(replicated.module[0].weight.grad, by_hand(network(), batches[:1])["0.weight"])

    mesh = init_device_mesh("cpu", (2,))
    model = network()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    mine = batches[2 * rank : 2 * rank + 2]
    found = collect(model, mine, [word for word in words if word != "grad_sq"], loss=cross_entropy)
    for name, entry in found.items():
        assert entry["grad"].placements == find_targets(model)[name].placements
        for word, tensor in entry.items():
            close(tensor.full_tensor(), expected[name][word])
        scores = find_targets(model)[name].detach().abs() * entry["input_norm"] + entry["grad"]
        assert scores.placements == entry["grad"].placements
    outermost, plain = network(), network()
    fully_shard(outermost, mesh=mesh)
    for each, own in ((outermost, mine), (plain, batches)):
        sparsify(each, 0.8, criterion=criteria.wanda, batches=own, rounds=3)
        sparsify(each, 0.9, criterion=criteria.snip, batches=own, loss=cross_entropy, rounds=2)
    for name, weight in find_targets(outermost).items():
        assert torch.equal(weight.full_tensor(), plain.get_parameter(name))
    close(outermost(x), plain(x))
    with pytest.raises(TypeError, match=r"0.weight is sharded, and flow can't be gathered on shards"):
        collect(model, mine, "flow")
    leave_group()


@pytest.mark.distributed
@pytest.mark.filterwarnings("ignore")
@pytest.mark.long
def test_ranks_agree(tmp_path):
    on_ranks(on_each_rank, str(tmp_path))
