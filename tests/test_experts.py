"""Experts of a mixture: recognised by structure and by trying, and the kernels against the definition.

Without a GPU the file runs once more in a child process whose Triton interprets the kernels on the CPU.
"""

from __future__ import annotations

import random

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

import transformers

from gapless.model.parts import experts as definition
from gapless.model.parts.experts import ACTIVATIONS, Experts, Gate, recognise
from gapless.model.parts.experts_triton import Tiles, run
from gapless.model.parts.router import Router
from gapless.model.parts.router_triton import choose as choose_by_kernel
from gapless.model.products.weight import Weight
from interpreted import CHILD, run_in_the_interpreter

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
kernels = pytest.mark.skipif(not (CHILD or GPU), reason="runs in the interpreter, in a child process, or on a GPU")


@pytest.mark.skipif(GPU or CHILD, reason="the kernels run in this process, or these cases do already")
def test_all_cases_in_the_interpreter() -> None:
    run_in_the_interpreter(__file__)


def some(gate: Gate, e: int, h: int, f: int, *, bias: bool, transposed: bool, dtype: torch.dtype) -> Experts:
    wide = f * (2 if gate.gated else 1)
    up, down = torch.randn(e, wide, h) / h**0.5, torch.randn(e, h, f) / f**0.5
    if transposed:
        up, down = up.transpose(1, 2).contiguous(), down.transpose(1, 2).contiguous()
    biases = (torch.randn(e, wide), torch.randn(e, h)) if bias else (None, None)
    parts = [t if t is None else t.to(DEVICE, dtype) for t in (up, down, *biases)]
    return Experts(*parts, transposed, gate)  # type: ignore[arg-type]


@kernels
@pytest.mark.parametrize("case", range(24))
def test_kernels_equal_the_definition(case: int) -> None:
    """Random sizes that fill no tile, all gates and layouts, experts that nobody chose, one that all chose."""
    seed = random.randrange(2**31)
    rng = random.Random(seed)
    torch.manual_seed(seed)
    gated = case % 5 != 4
    gate = Gate(
        ACTIVATIONS[case % len(ACTIVATIONS)],
        gated,
        interleaved=gated and rng.random() < 0.5,
        alpha=rng.choice([1.0, 1.702]) if case % len(ACTIVATIONS) == 0 else 1.0,
        limit=rng.choice([0.0, 0.7]) if gated else 0.0,
        offset=rng.choice([0.0, 1.0]) if gated else 0.0,
    )
    e, k, tokens = rng.choice([3, 8, 33]), rng.choice([1, 2, 3]), rng.choice([1, 2, 7, 40, 90])
    h, f = rng.choice([24, 64, 80]), rng.choice([16, 40, 72])
    dtype = rng.choice([torch.float32, torch.float32, torch.float16])
    bias, transposed = rng.random() < 0.5, rng.random() < 0.5
    print(f"seed={seed} {gate} e={e} k={k} t={tokens} h={h} f={f} {dtype} bias={bias} transposed={transposed}")
    experts = some(gate, e, h, f, bias=bias, transposed=transposed, dtype=dtype)
    x = torch.randn(tokens, h).to(DEVICE, dtype)
    used = rng.randint(k, e)
    chosen = torch.stack([torch.randperm(used)[:k] for _ in range(tokens)])
    if rng.random() < 0.3:
        chosen[:, 0] = e - 1
    weights = torch.rand(tokens, k).to(DEVICE, rng.choice([dtype, torch.float32]))
    pairs = rng.choice([16, 32])
    tiles = (Tiles(pairs, 16, 32, 2, 4), Tiles(pairs, 32, 16, 2, 4))
    got = run(x, experts, chosen.to(DEVICE), weights, rng.choice([None, tiles]))
    want = definition.reference(x, experts, chosen.to(DEVICE), weights)
    tolerance = 2e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance * float(want.float().abs().max() + 1))


@kernels
def test_order_and_neighbours_change_no_bit() -> None:
    """A token's output is its own, whoever else is in the batch."""
    torch.manual_seed(3)
    experts = some(Gate("silu"), 9, 32, 24, bias=False, transposed=False, dtype=torch.float32)
    x, chosen, weights = torch.randn(30, 32, device=DEVICE), torch.randint(0, 9, (30, 2), device=DEVICE), None
    weights = torch.rand(30, 2, device=DEVICE)
    tiles = (Tiles(16, 16, 16, 2, 4), Tiles(16, 16, 16, 2, 4))
    whole = run(x, experts, chosen, weights, tiles)
    order = torch.randperm(30, device=DEVICE)
    assert torch.equal(run(x[order], experts, chosen[order], weights[order], tiles), whole[order])
    assert torch.equal(run(x[4:5], experts, chosen[4:5], weights[4:5], tiles), whole[4:5])


@kernels
@pytest.mark.parametrize("case", range(16))
def test_the_router_s_kernel_equals_the_definition(case: int) -> None:
    seed = random.randrange(2**31)
    rng = random.Random(seed)
    torch.manual_seed(seed)
    e, tokens = rng.choice([3, 8, 33, 128]), rng.choice([1, 5, 40])
    k, score = rng.randint(1, min(e, 9)), rng.choice(["softmax", "sigmoid", "logits"])
    dtype = rng.choice([torch.float32, torch.float16])
    correction = torch.randn(e, device=DEVICE) if score != "logits" and rng.random() < 0.5 else None
    print(f"seed={seed} e={e} k={k} t={tokens} {score} {dtype} correction={correction is not None}")
    weight = Weight(torch.zeros(e, 4, device=DEVICE))
    normed = score != "logits" and rng.random() < 0.5
    router = Router(weight, k, score, correction, normed, rng.choice([1.0, 2.5]), rng.choice([dtype, torch.float32]))
    # No two alike, and all where a sigmoid tells them apart: beyond 17 every float32 is 1.
    logits = torch.stack([torch.randperm(e) for _ in range(tokens)]).to(DEVICE, dtype) / 16 - 4
    chosen, weights = choose_by_kernel(router, logits)
    want, want_weights = router.choose(logits)
    assert torch.equal(chosen.long(), want)
    torch.testing.assert_close(weights, want_weights, rtol=2e-3 if dtype != torch.float32 else 1e-5, atol=1e-6)


@kernels
def test_of_equal_scores_the_lower_expert_comes_first_and_nan_stays_in_its_row() -> None:
    router = Router(Weight(torch.zeros(6, 4, device=DEVICE)), 3, "softmax", None, True, 1.0, torch.float32)
    logits = torch.zeros(2, 6, device=DEVICE)
    logits[1] = float("nan")
    chosen, weights = choose_by_kernel(router, logits)
    assert chosen[0].tolist() == [0, 1, 2]
    assert weights[0].tolist() == pytest.approx([1 / 3] * 3)
    assert ((chosen >= 0) & (chosen < 6)).all()


def models() -> dict[str, torch.nn.Module]:
    small = {"hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64}  # fmt: skip
    moe = {"moe_intermediate_size": 16, "num_experts": 6, "num_experts_per_tok": 2}
    made = {
        "qwen3_moe": transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**small, **moe)),
        "mixtral": transformers.MixtralForCausalLM(transformers.MixtralConfig(**small, num_local_experts=4)),
        "gpt_oss": transformers.GptOssForCausalLM(
            transformers.GptOssConfig(**small, num_local_experts=4, num_experts_per_tok=2)
        ),
        "olmoe": transformers.OlmoeForCausalLM(
            transformers.OlmoeConfig(**{**small, "num_experts": 6, "num_experts_per_tok": 2})
        ),
    }
    for model in made.values():
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
    return made


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "gpt_oss", "olmoe"])
def test_experts_of_real_models_are_recognised(kind: str) -> None:
    torch.manual_seed(0)
    model = models()[kind]
    modules = [m for m in model.modules() if hasattr(m, "has_gate")]
    assert modules
    for module in modules:
        found = recognise(module)
        assert found is not None
        x = torch.randn(11, found.hidden)
        chosen = torch.stack([torch.randperm(found.count)[:2] for _ in range(11)])
        weights = torch.rand(11, 2)
        with torch.no_grad():
            theirs = module(x, chosen, weights)
        torch.testing.assert_close(definition.reference(x, found, chosen, weights), theirs, rtol=1e-4, atol=1e-5)
    assert found.gate.limit == (7.0 if kind == "gpt_oss" else 0.0)


def test_another_gate_is_not_taken_for_a_known_one() -> None:
    model = models()["qwen3_moe"]
    module = next(m for m in model.modules() if hasattr(m, "has_gate"))
    module._apply_gate = lambda x: torch.tanh(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1]
    assert recognise(module) is None
    assert recognise(torch.nn.Linear(3, 3)) is None


@kernels
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_a_whole_model_gives_its_own_logits(kind: str) -> None:
    torch.manual_seed(0)
    model = models()[kind].to(DEVICE).eval()
    ids = torch.randint(0, 64, (1, 13), device=DEVICE)
    with torch.no_grad():
        before = model(ids).logits
        assert definition.install(model, run) == 2
        after = model(ids).logits
    torch.testing.assert_close(after, before, rtol=1e-3, atol=1e-4)
