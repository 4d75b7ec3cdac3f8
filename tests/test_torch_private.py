"""Every private name of torch, transformers, Triton and DeepSpeed that Locater uses does what Locater needs of it.

A failure here means that a new version of the library changed it: correct `locater/torch_private.py`, and nothing else.
"""

from __future__ import annotations

import ast
import copy
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from locater import torch_private as private
from tests import ROOT
from tests.processes import ranks


def test_every_name_is_tested() -> None:
    """A function without a test here could change without notice."""
    source = Path(__file__).read_text()
    functions = inspect.getmembers(private, inspect.isfunction)
    names = [name for name, function in functions if function.__module__ == private.__name__]
    assert len(names) > 40
    assert [name for name in names if f"private.{name}" not in source] == []


def test_torch_private_is_the_only_file_with_private_names() -> None:
    """Of torch's own modules; the reader of pickles has names of them as text, which are a file format."""
    found = []
    for file in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("torch", "transformers"):
                parts = [*(node.module or "").split("."), *(name.name for name in node.names)]
            elif isinstance(node, ast.Attribute) and re.fullmatch(r"(torch|transformers)[\w.]+", ast.unparse(node)):
                parts = ast.unparse(node).split(".")
            else:
                continue
            if any(part.startswith("_") and not part.startswith("__") for part in parts):
                found.append(f"{file.name}: {'.'.join(parts)}")
    assert {entry for entry in found if not entry.startswith("torch_private.py")} == set()


# The forward and the backward pass


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_pass_that_checkpointing_repeats_is_in_the_backward_pass(reentrant: bool) -> None:
    seen: list[bool] = []

    def block(x: Tensor) -> Tensor:
        seen.append(private.in_backward_pass())
        return x.sin().cos()

    x = torch.ones(3, requires_grad=True)
    checkpoint(block, x, use_reentrant=reentrant).sum().backward()
    assert seen == [False, True]
    assert not private.in_backward_pass()


def test_torch_compile_leaves_a_disabled_function_alone_and_calls_a_constant_one_once() -> None:
    traced: list[str] = []

    def disabled(x: Tensor) -> Tensor:
        traced.append("traced" if torch.compiler.is_dynamo_compiling() else "ran")
        return x + 1

    def constant(number: int) -> int:
        traced.append("constant")
        return number

    whole, once = private.disable_dynamo(disabled), private.assume_constant_result(constant)

    @torch.compile(backend="eager")
    def run(x: Tensor) -> Tensor:
        return whole(x * 2) * once(3)

    for _ in range(3):
        assert run(torch.ones(2)).tolist() == [9.0, 9.0]
    assert traced.count("ran") == 3
    assert traced.count("constant") == 1
    assert "traced" not in traced


def test_a_constant_function_is_marked_as_the_public_name_does() -> None:
    public = torch.compiler.assume_constant_result(lambda: 1)
    assert vars(private.assume_constant_result(lambda: 1)) == vars(public)


def test_errors_of_torch_compile_are_known() -> None:
    from torch._dynamo import exc

    assert private.is_dynamo_error(exc.Unsupported("a graph break"))
    assert not private.is_dynamo_error(RuntimeError("another"))


# Modes


class Recorder(TorchFunctionMode):
    """Notes the functions that are called under it."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def test_the_innermost_function_mode_is_found_and_suspended() -> None:
    assert private.current_function_mode() is None
    with Recorder() as outer, Recorder() as inner:
        assert private.current_function_mode() is inner
        with private.without_current_function_mode():
            assert private.current_function_mode() is outer
            torch.sin(torch.ones(1))
        with private.without_function_modes():
            torch.cos(torch.ones(1))
    assert "sin" in outer.names
    assert "sin" not in inner.names
    assert "cos" not in outer.names + inner.names


def test_dispatch_modes_are_suspended() -> None:
    class Dispatched(TorchDispatchMode):
        names: list[str]

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.names.append(str(func))
            return func(*args, **(kwargs or {}))

    mode = Dispatched()
    mode.names = []
    with mode, private.without_dispatch_modes():
        torch.ones(2).sin()
    assert mode.names == []
    with mode:
        torch.ones(2).sin()
    assert mode.names


def test_transforms_are_suspended() -> None:
    def scaled(x: Tensor) -> Tensor:
        with private.without_dispatch_modes():
            factors = torch.ones(2).sin().tolist()  # of a functional tensor there would be no numbers
        return x * factors[0]

    graph = make_fx(functionalize(scaled), tracing_mode="fake")(torch.ones(3))
    torch.testing.assert_close(graph(torch.ones(3)), torch.full((3,), 1.0).sin())


def test_fake_tensors_have_no_data_and_are_suspended() -> None:
    with private.fake_tensor_mode() as mode:
        fake = mode.from_tensor(torch.ones(3, 2))
        assert fake.shape == (3, 2)
        assert (fake @ torch.ones(2, 5)).shape == (3, 5)
        with pytest.raises(Exception, match=r"_local_scalar_dense"):
            float(fake.sum())
        with private.without_fake_tensors():
            assert float(torch.ones(2).sum()) == 2.0


def test_trees() -> None:
    tree = {"a": [1, (2, 3)], "b": None}
    leaves, structure = private.tree_flatten(tree)
    assert leaves == private.tree_leaves(tree) == [1, 2, 3, None]
    assert structure == private.tree_flatten(copy.deepcopy(tree))[1]
    assert structure != private.tree_flatten({"a": [1, [2, 3]], "b": None})[1]
    assert private.tree_map(lambda x: x, tree) == tree
    pair = private.tree_leaves(tree, is_leaf=lambda x: isinstance(x, tuple))
    assert pair == [1, (2, 3), None]
    doubled = private.tree_map(
        lambda x: len(x) if isinstance(x, tuple) else x, tree, is_leaf=lambda x: type(x) is tuple
    )
    assert doubled == {"a": [1, 2], "b": None}


# Tensors


def test_writes_are_counted_over_views() -> None:
    x = torch.zeros(4)
    view = x[1:]
    before = private.write_count(x)
    view.add_(1)
    assert private.write_count(x) == private.write_count(view) == before + 1
    assert private.base_of_view(view) is x
    assert private.base_of_view(x) is None
    assert private.storage_id(x) == private.storage_id(view) != private.storage_id(torch.zeros(4))


def test_many_tensors_in_one_operation() -> None:
    parts = [torch.arange(2.0), torch.arange(3.0).reshape(3, 1)]
    assert private.flatten_together(parts).tolist() == [0, 1, 0, 1, 2]
    private.add_to_each(parts, [10.0, 20.0])
    assert parts[0].tolist() == [10, 11]
    private.add_to_each(parts, [torch.ones(2), torch.ones(3, 1)])
    private.subtract_from_each(parts, torch.inf)
    assert all(bool((x == -torch.inf).all()) for x in parts)
    private.zero_each(parts)
    assert [x.sum().item() for x in parts] == [0, 0]


# Modules


def test_what_a_module_has_itself() -> None:
    outer = nn.Sequential(nn.Linear(2, 2, bias=False))
    outer.register_buffer("saved", torch.ones(1))
    outer.register_buffer("unsaved", torch.ones(1), persistent=False)
    inner = outer[0]
    assert private.own_children(outer) == {"0": inner}
    assert private.own_parameters(outer) == {}
    assert private.own_parameters(inner) == {"weight": inner.weight, "bias": None}
    assert list(private.own_buffers(outer)) == ["saved", "unsaved"]
    assert private.unsaved_buffers(outer) == {"unsaved"}
    private.own_parameters(inner).clear()  # the module's own dictionary, not a copy
    assert list(inner.parameters()) == []


def test_every_tensor_of_a_module_is_converted() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    assert private.convert_tensors(model, lambda x: x.double() if x.is_floating_point() else x) is model
    assert {x.dtype for x in model.state_dict().values()} == {torch.float64, torch.int64}


def hooked() -> nn.Module:
    module = nn.Linear(2, 2)
    module.register_forward_pre_hook(lambda *_: None)
    module.register_forward_hook(lambda *_: None)
    module.register_full_backward_pre_hook(lambda *_: None)
    module.register_full_backward_hook(lambda *_: None)
    module.register_state_dict_pre_hook(lambda *_: None)
    module.register_state_dict_post_hook(lambda *_: None)
    module.register_load_state_dict_pre_hook(lambda *_: None)
    module.register_load_state_dict_post_hook(lambda *_: None)
    return module


def test_every_hook_of_a_module_is_in_its_tables() -> None:
    tables = private.hook_tables(hooked())
    assert sum(len(table) for table in tables) == 8
    assert sum(len(table) for table in private.hook_tables(nn.Linear(2, 2))) == 0
    assert set(private.HOOK_TABLES) <= set(vars(nn.Linear(2, 2)))


def test_norms_of_batches() -> None:
    for kind in (nn.BatchNorm1d, nn.BatchNorm3d, nn.InstanceNorm2d, nn.SyncBatchNorm):
        assert private.is_batch_norm(kind(3))
    assert not any(private.is_batch_norm(module) for module in (nn.LayerNorm(3), nn.GroupNorm(1, 3), nn.RMSNorm(3)))


def test_a_spectral_norm_moves_on_when_it_is_read_in_training() -> None:
    torch.manual_seed(0)
    linear = nn.utils.parametrizations.spectral_norm(nn.Linear(32, 32))
    step = linear.parametrizations["weight"][0]
    assert private.updates_in_training(step)
    before = step._u.clone()
    _ = linear.weight
    assert not torch.equal(before, step._u)
    assert not private.updates_in_training(step.eval())
    orthogonal = nn.utils.parametrizations.orthogonal(nn.Linear(3, 3))
    assert not private.updates_in_training(orthogonal.parametrizations["weight"][0])


# torch.compile


def test_compiled_models_are_unwrapped() -> None:
    model = nn.Linear(2, 2)
    assert private.unwrap_compiled(model) is model
    assert not private.is_compiled_wrapper(model)
    compiled = torch.compile(model, backend="eager")
    assert private.is_compiled_wrapper(compiled)
    assert private.unwrap_compiled(compiled) is model
    assert private.own_children(compiled)["_orig_mod"] is model


def test_compilation_in_place_is_seen_and_undone() -> None:
    model = nn.Linear(2, 2)
    assert not private.is_compiled_in_place(model)
    model.compile(backend="eager")
    assert private.is_compiled_in_place(model)
    called: list[int] = []
    setattr(model, private.COMPILED_CALL, lambda x: called.append(1))
    model(torch.ones(2))  # calling the module runs this attribute
    assert called == [1]
    private.drop_compiled_call(model)
    assert not private.is_compiled_in_place(model)
    assert model(torch.ones(2)).shape == (2,)


# nn.MultiheadAttention and nn.TransformerEncoderLayer


def test_the_fused_encoder_layer_is_replaced() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
    x, calls = torch.randn(1, 3, 8), []

    def fused(*args: Any, **kw: Any) -> Tensor:
        calls.append(len(args))
        return original(*args, **kw)

    with torch.no_grad():
        expected = layer(x)
        original = private.replace_fused_encoder_layer(fused)
        try:
            out = layer(x)
        finally:
            assert private.replace_fused_encoder_layer(original) is fused
        assert torch.equal(out, expected)
        layer(x)
    assert len(calls) == 1
    assert hasattr(torch, private.FUSED_ENCODER_LAYER)


def test_the_projections_of_multihead_attention() -> None:
    assert private.has_joint_projection(nn.MultiheadAttention(8, 2))
    assert not private.has_joint_projection(nn.MultiheadAttention(8, 2, kdim=4))


def test_the_layers_of_transformers_call_their_attention_in_these_steps() -> None:
    for kind, steps in (
        (nn.TransformerEncoderLayer, private.ENCODER_STEPS[:1]),
        (nn.TransformerDecoderLayer, private.ENCODER_STEPS),
    ):
        for step in steps:
            assert "_attn(" in inspect.getsource(getattr(kind, step))
            assert f"self.{step}(" in inspect.getsource(kind.forward)


# Distributed training


@pytest.fixture
def group() -> Iterator[Any]:
    """A group of one process, and its mesh of one device."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def test_placements_and_shards(group: Any) -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    placed = distribute_tensor(torch.ones(4, 2), group, [Shard(0)])
    assert private.placement_of(placed).placements == (Shard(0),)
    assert private.placement_of(placed).mesh == group
    assert private.placement_of(torch.ones(2)) is None
    assert private.placement_of(None) is None

    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight  # tied: one parameter with two uses
    model[0].bias = nn.Parameter(distribute_tensor(torch.ones(2), group, [Shard(0)]))
    with pytest.raises(AttributeError):
        list(private.fsdp_parameters(model))
    plain = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
    plain[1].weight = plain[0].weight
    fully_shard(plain, mesh=group)
    rows = {name: row for row in private.fsdp_parameters(plain) for _, name in row.uses}
    assert [module for module, _ in rows["weight"].uses] == [plain[0], plain[1]]
    assert rows["bias"].uses == [(plain[0], "bias")]
    assert rows["weight"].gathered is None, "a plain tensor before FSDP2"
    assert rows["weight"].mesh_info.mesh == group
    assert isinstance(rows["weight"], private.ShardedParameter)


def test_what_fsdp_gathers_of_a_tensor_parallel_parameter(group: Any) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    assert dist.get_world_size() == 1
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(2, 2, bias=False))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    (row,) = private.fsdp_parameters(model)
    assert row.uses == [(model[0], "weight")]
    assert row.gathered.placements == (Shard(0),)
    assert row.gathered.mesh.mesh_dim_names == ("tp",)


def test_context_parallelism_splits_sequences(group: Any) -> None:
    from torch.distributed.tensor.experimental import context_parallel

    x = torch.arange(4.0)[None]
    assert not private.splits_sequences()
    assert private.sequence_mesh() is None
    with context_parallel(group, buffers=[x], buffer_seq_dims=[1]):
        assert private.splits_sequences()
        assert private.sequence_mesh() is group
        assert private.sequence_order(8, 2).tolist() == [0, 1, 6, 7, 2, 3, 4, 5]
        assert private.sequence_order(6, 2).tolist() == [0, 1, 2, 3, 4, 5]
    assert not private.splits_sequences()
    assert private.sequence_mesh() is None
    assert private.RING_ATTENTION in sys.modules


def test_a_stage_of_a_pipeline_tries_its_shapes_first(group: Any) -> None:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    class Part(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            tried.append(private.in_trial_pass())
            return super().forward(x)

    tried: list[bool] = []
    stage = PipelineStage(Part(2, 2), 0, 1, torch.device("cpu"), group=group.get_group())
    ScheduleGPipe(stage, 2, loss_fn=lambda x, y: (x - y).sum()).step(torch.ones(2, 2), target=torch.ones(2, 2))
    assert tried == [True, False, False]
    assert not private.in_trial_pass()


def test_a_module_whose_keys_are_gathered(group: Any) -> None:
    from torch.distributed.tensor.experimental._context_parallel import _attention as ring
    from torch.distributed.tensor.parallel import parallelize_module

    module, kind = nn.Linear(2, 2), ring._ContextParallel
    assert not private.gathers_keys(module)
    parallelize_module(module, group, kind(seq_dim=2, attention_type=kind.AttentionType.FLEX))
    assert private.gathers_keys(module)


def test_plain_parameters_are_whole() -> None:
    weight = nn.Parameter(torch.ones(2, 3))
    assert private.whole_shape(weight) == (2, 3)
    for asks in (private.is_partitioned, private.is_empty_now, private.is_copied_to_train):
        assert not asks(weight)
    with private.gathered_partitions(weight):
        assert weight.shape == (2, 3)


def partitioned_by_deepspeed(rank: int) -> None:
    import deepspeed

    deepspeed.init_distributed("gloo")
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True}
    for stage in (2, 3):
        model = nn.Linear(3, 2)
        config["zero_optimization"] = {"stage": stage, "stage3_param_persistence_threshold": 0}
        deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config)
        weight = model.weight
        assert private.whole_shape(weight) == (2, 3)
        assert private.is_copied_to_train(weight)
        assert private.is_partitioned(weight) == private.is_empty_now(weight) == (stage == 3)
        assert weight.numel() == (0 if stage == 3 else 6)
        with private.gathered_partitions(weight):
            assert weight.shape == (2, 3)
            assert not private.is_empty_now(weight)
            with private.gathered_partitions(weight):
                assert weight.shape == (2, 3)
            assert weight.shape == (2, 3), "what was whole before stays whole"
        assert private.is_empty_now(weight) == (stage == 3)


@pytest.mark.slow
def test_parameters_that_deepspeed_partitions(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: pip install 'locater[slow]'")
    ranks(partitioned_by_deepspeed, tmp_path, 1)


def test_fused_adam_divides_by_the_loss_scale() -> None:
    weight = [nn.Parameter(torch.ones(2))]
    assert private.unscales_gradients(torch.optim.Adam(weight, fused=True))
    assert not private.unscales_gradients(torch.optim.Adam(weight))
    assert not private.unscales_gradients(torch.optim.SGD(weight, lr=0.1))


# Files


def test_records_of_a_saved_file(tmp_path: Path) -> None:
    import pickletools

    torch.save({"w": torch.arange(3, dtype=torch.uint8)}, tmp_path / "x.pt")
    path = str(tmp_path / "x.pt")
    assert private.read_archive_record(path, "data/0") == bytes([0, 1, 2])
    names = [value for _, value, _ in pickletools.genops(private.read_archive_record(path, "data.pkl"))]
    assert "w" in names
    with (tmp_path / "x.pt").open("rb") as file:
        assert private.read_archive_record(file, "data/0") == bytes([0, 1, 2])


def test_the_module_of_the_compiler_is_there() -> None:
    assert hasattr(importlib.import_module(private.compiler_module()), "optimize")


# transformers


def transformers_model(name: str, **settings: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")(**settings)
    return getattr(transformers, f"{name}Model")(config).eval()


GPT2 = dict(n_layer=1, n_head=2, n_embd=8, vocab_size=16, n_positions=8)


def test_attention_functions_are_looked_up_in_the_tables() -> None:
    model = transformers_model("GPT2", **GPT2)
    tables, calls = private.attention_tables(), []
    assert all(name in tables[0] for name in ("sdpa", "flex_attention"))
    function = tables[0]["sdpa"]

    def counted(*args: Any, **kw: Any) -> Any:
        calls.append(1)
        return function(*args, **kw)

    for table in tables:  # the local table overrides the global one
        before = table.get("sdpa")
        table["sdpa"] = counted
        try:
            model(torch.zeros(1, 3, dtype=torch.long))
        finally:
            if before is None:
                del table["sdpa"]
            else:
                table["sdpa"] = before
    assert len(calls) == 2


def test_the_implementation_and_the_path_of_a_model(tmp_path: Path) -> None:
    model = transformers_model("GPT2", **GPT2)
    assert private.attention_implementation(model) == "sdpa"
    model.set_attn_implementation("eager")
    assert private.attention_implementation(model.h[0].attn) == "eager"
    assert private.attention_implementation(nn.Linear(2, 2)) is None
    assert private.saved_path(model.config) == ""
    model.save_pretrained(tmp_path)
    assert private.saved_path(type(model).from_pretrained(tmp_path).config) == str(tmp_path)
    assert private.saved_path(None) == ""


def test_settings_of_single_layers() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(num_hidden_layers=3, per_layer_config={1: {"num_key_value_heads": 2}})
    overrides = private.settings_of_single_layers(vars(config))
    assert {number: dict(settings) for number, settings in overrides.items()} == {1: {"num_key_value_heads": 2}}
    assert private.settings_of_single_layers(vars(transformers.LlamaConfig(num_hidden_layers=3))) == {}


def test_hooks_of_transformers_are_registered_again_in_a_copy() -> None:
    """They are what returns hidden states; a copy without hooks has lost them."""
    model = transformers_model(
        "Llama", hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=16
    )
    ids = torch.zeros(1, 3, dtype=torch.long)
    model(ids, output_hidden_states=True)
    hooks = [hook for module in model.modules() for table in private.hook_tables(module) for hook in table.values()]
    assert sum(map(private.is_output_hook, hooks)) > 0
    for module in model.modules():
        for table in private.hook_tables(module):
            table.clear()
        private.forget_output_hooks(module)
    assert len(model(ids, output_hidden_states=True).hidden_states) == 2
    assert not private.is_output_hook(len)


def test_the_gate_of_experts() -> None:
    """A method of its own (GPT-OSS), and gate and up in halves (Mixtral)."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    joint = torch.randn(3, 8)
    own = GptOssExperts(transformers.GptOssConfig(hidden_size=4, intermediate_size=4, num_local_experts=2))
    gate, up = joint[:, ::2].clamp(max=own.limit), joint[:, 1::2].clamp(-own.limit, own.limit)
    expected = (up + 1) * gate * torch.sigmoid(gate * own.alpha)
    assert torch.allclose(private.apply_expert_gate(own, joint), expected)
    halves = MixtralExperts(transformers.MixtralConfig(hidden_size=4, intermediate_size=4, num_local_experts=2))
    expected = nn.functional.silu(joint[:, :4]) * joint[:, 4:]
    assert torch.allclose(private.apply_expert_gate(halves, joint), expected)


def test_joint_projections_of_bloom_and_falcon_are_split() -> None:
    joint = torch.randn(2, 3, 24)
    bloom = transformers_model("Bloom", vocab_size=16, hidden_size=8, n_layer=1, n_head=2)
    q, k, v = private.split_bloom(bloom.h[0].self_attention, joint)
    by_head = joint.view(2, 3, 2, 3, 4)
    for part, made in enumerate((q, k, v)):
        assert torch.equal(made, by_head[:, :, :, part].transpose(1, 2))
    settings = dict(vocab_size=16, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, multi_query=False)
    falcon = transformers_model("Falcon", **settings)
    for part, made in enumerate(private.split_falcon(falcon.h[0].self_attention, joint)):
        assert torch.equal(made, by_head[:, :, :, part])


def test_the_attention_method_of_gptj() -> None:
    model = transformers_model("GPTJ", vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=2, rotary_dim=2)
    attention, shapes = model.h[0].attn, []
    inner = getattr(attention, private.GPTJ_ATTENTION)

    def recorded(query: Tensor, key: Tensor, *args: Any, **kw: Any) -> Any:
        shapes.append((query.shape, key.shape))
        return inner(query, key, *args, **kw)

    setattr(attention, private.GPTJ_ATTENTION, recorded)
    model(torch.zeros(1, 3, dtype=torch.long))
    assert shapes == [((1, 2, 3, 4), (1, 2, 3, 4))]


# Triton


def test_versions_of_triton_whose_launch_was_tried() -> None:
    for major, minor in private.DIRECT_LAUNCHES:
        assert private.has_tested_launch(f"{major}.{minor}.0")
        assert not private.has_tested_launch(f"{major + 1}.{minor}.0")


@pytest.mark.gpu
def test_a_compiled_kernel_is_launched_past_the_dispatch() -> None:
    import triton

    from locater.kernels import triton_kept_kernels
    from locater.kernels.triton_parts import compared_kernel

    if not private.has_tested_launch(triton.__version__):
        pytest.skip(f"Triton {triton.__version__}: kernels are launched by its dispatch")
    x = torch.arange(1, 17, dtype=torch.float32, device="cuda")
    first, second = torch.zeros(2, 16, device="cuda")
    kernel = compared_kernel[(1, 1, 1)](x, first, None, 1, 13, 0.5, SIZE=16, TWICE=True)
    private.launch_compiled(kernel, (1, 1, 1), [x, second, None, 1, 13, 0.5, 16, True])
    assert torch.equal(first, second)
    assert triton_kept_kernels.launches_directly(x.device)


def test_a_compiled_kernel_takes_all_arguments_in_order() -> None:
    seen: list[Any] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, int, int]) -> Any:
            return lambda *arguments: seen.append((grid, arguments))

    private.launch_compiled(Kernel(), (2, 1, 1), [1, None, 16])
    assert seen == [((2, 1, 1), (1, None, 16))]
