"""Every seeded drift of SGLang turns the contract red; the message says which read, what was expected, what found."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from glm53_mono.upstream.contract import check
from glm53_mono.upstream.reads import SGLANG_READS
from glm53_mono.upstream.source import SourceTree
from tests.contract.sglang_copies import Edit, adding, changed_copy, composed, moving, replacing

SPEC = "sglang.kernels.plugin_kernels.amd.spec"
BINDING = "sglang.srt.kernel_plugins.amd.binding"
GLM = "sglang.srt.models.glm5_next"
MEMORY = "sglang.srt.mem_cache.memory_pool"
HYBRID = "sglang.srt.layers.attention.hybrid_linear_attn_backend"
METADATA = "sglang.srt.layers.attention.mamba.mamba2_metadata"
LOGITS = "sglang.srt.layers.logits_processor"
HOOKS = "sglang.srt.plugins.hook_registry"
FP8 = "sglang.srt.layers.quantization.fp8"
UNQUANTIZED = "sglang.srt.layers.quantization.unquant"

STATE_LAYER_CACHE = """    def state_layer_cache(self, layer_id: int):
        return self.req_to_token_pool.mamba_pool.mamba2_layer_cache(layer_id)
"""


@dataclass(frozen=True)
class Drift:
    """A change of SGLang, the one read that it breaks, and what the message must say."""

    name: str
    edits: dict[str, Edit]
    read: str
    expected: str
    found: str


DRIFTS = (
    Drift(
        "mark of a shuffled weight renamed",
        {FP8: replacing(r"layer\.aiter_bpreshuffled = True", "layer.is_bpreshuffled = True")},
        "Fp8LinearMethod.process_weights_after_loading_block_quant.aiter_bpreshuffled",
        "to set layer.aiter_bpreshuffled = True",
        "aiter_bpreshuffled set nowhere in it",
    ),
    Drift(
        "method moved to another class of the file",
        {MEMORY: moving("get_compress_tail_buffers", from_class="DSATokenToKVPool", to_class="MHATokenToKOnlyPool")},
        "DSATokenToKVPool.get_compress_tail_buffers",
        "method get_compress_tail_buffers of class DSATokenToKVPool",
        "none there, but get_compress_tail_buffers in class HybridLinearKVPool of the same file",
    ),
    Drift(
        "argument renamed",
        {LOGITS: replacing(r"\blm_head: Vocab", "head: Vocab", inside="LogitsProcessor.forward")},
        "LogitsProcessor.forward",
        "forward(input_ids, hidden_states, lm_head, logits_metadata, aux_hidden_states=None)",
        "forward(input_ids, hidden_states, head, logits_metadata, aux_hidden_states=None",
    ),
    Drift(
        "argument default changed",
        {
            GLM: replacing(
                r"input_embeds: torch.Tensor = None",
                "input_embeds: torch.Tensor = ()",
                inside="Glm5NextForConditionalGeneration.forward",
            )
        },
        "Glm5NextForConditionalGeneration.forward",
        "input_embeds=None",
        "input_embeds=()",
    ),
    Drift(
        "argument added to the forward that we replace",
        {
            GLM: replacing(
                r"input_embeds: torch.Tensor = None,",
                r"\g<0> get_embedding: bool = False,",
                inside="Glm5NextForConditionalGeneration.forward",
            )
        },
        "Glm5NextForConditionalGeneration.forward",
        "and no others",
        "get_embedding=False",
    ),
    Drift(
        "dataclass field dropped",
        {METADATA: replacing(r"    mamba_cache_indices: torch.Tensor\n", "", inside="ForwardMetadata")},
        "ForwardMetadata.mamba_cache_indices",
        "field mamba_cache_indices in the body of class ForwardMetadata",
        "none there",
    ),
    Drift(
        "enum member renamed",
        {HOOKS: replacing(r"AFTER = ", "POST = ", inside="HookType")},
        "HookType.AFTER",
        "field AFTER in the body of class HookType",
        "none there",
    ),
    Drift(
        "API version bumped",
        {SPEC: replacing(r"MONOKERNEL_API_VERSION = 1", "MONOKERNEL_API_VERSION = 2")},
        "spec.MONOKERNEL_API_VERSION",
        "MONOKERNEL_API_VERSION = 1",
        "MONOKERNEL_API_VERSION = 2",
    ),
    Drift(
        "constant changed",
        {GLM: replacing(r"_MHC_POST_MULT_VALUE = 2.0", "_MHC_POST_MULT_VALUE = 1.0")},
        "glm5_next._MHC_POST_MULT_VALUE",
        "_MHC_POST_MULT_VALUE = 2.0",
        "_MHC_POST_MULT_VALUE = 1.0",
    ),
    Drift(
        "attribute no longer assigned in __init__",
        {
            GLM: composed(
                replacing(r"self\.A_log = ", "decay = ", inside="Glm5NextLinearAttention.__init__"),
                adding("    def bind(self, decay):\n        self.A_log = decay\n", to_class="Glm5NextLinearAttention"),
            )
        },
        "Glm5NextLinearAttention.A_log",
        "self.A_log assigned in Glm5NextLinearAttention.__init__",
        "none there",
    ),
    Drift(
        "attribute built by another class",
        {GLM: replacing(r"self\.o_norm = FusedRMSNormGated", "self.o_norm = RMSNorm")},
        "Glm5NextLinearAttention.o_norm",
        "self.o_norm built by FusedRMSNormGated",
        "self.o_norm built by RMSNorm",
    ),
    Drift(
        "name imported from another class",
        {GLM: replacing(r"DeepseekV2MoE as Glm5NextMoE", "DeepseekV2MLP as Glm5NextMoE")},
        "glm5_next.Glm5NextMoE",
        "Glm5NextMoE to be sglang.srt.models.deepseek_v2.DeepseekV2MoE",
        "Glm5NextMoE to be sglang.srt.models.deepseek_v2.DeepseekV2MLP",
    ),
    Drift(
        "our forward called otherwise",
        {BINDING: replacing(r"built\.forward\(Plan\(key=key\), \*args", "built.forward(Plan(key=key), batch, *args")},
        "_install_forward.built.forward",
        "to call built.forward(Plan(key=key), *args, **kwargs)",
        "built.forward(Plan(key=key), batch, *args, **kwargs)",
    ),
    Drift(
        "property turned into a method",
        {MEMORY: replacing(r"@property\n    def index_k_with", "def index_k_with", inside="DSATokenToKVPool")},
        "DSATokenToKVPool.index_k_with_scale_buffer",
        "property index_k_with_scale_buffer",
        "a method",
    ),
    Drift(
        "parameter registered under another name",
        {
            UNQUANTIZED: replacing(
                r'register_parameter\("w13_weight"',
                'register_parameter("w1_weight"',
                inside="UnquantizedFusedMoEMethod.create_weights",
            )
        },
        "UnquantizedFusedMoEMethod.w13_weight",
        "register parameter w13_weight",
        "w1_weight",
    ),
    Drift(
        "both KDA layer caches present",
        {HYBRID: adding(STATE_LAYER_CACHE, to_class="MambaAttnBackendBase")},
        "KDA layer cache",
        "exactly one of KDAAttnBackend.state_layer_cache | HybridReqToTokenPool.mamba2_layer_cache",
        "both",
    ),
    Drift(
        "neither KDA layer cache present, though the name is still in the file",
        {MEMORY: moving("mamba2_layer_cache", from_class="HybridReqToTokenPool", to_class=None)},
        "KDA layer cache",
        "exactly one of",
        "none there, but mamba2_layer_cache in class MambaPool of the same file",
    ),
    Drift(
        "the newer KDA layer cache moved to another class of the file",
        {
            MEMORY: moving("mamba2_layer_cache", from_class="HybridReqToTokenPool", to_class=None),
            HYBRID: adding(STATE_LAYER_CACHE, to_class="HybridLinearAttnBackend"),
        },
        "KDA layer cache",
        "exactly one of",
        "neither",
    ),
)


def test_the_installed_sglang_offers_every_read(installed: SourceTree) -> None:
    assert [str(drift) for drift in check(SGLANG_READS, installed)] == []


@pytest.mark.parametrize("drift", DRIFTS, ids=lambda drift: drift.name)
def test_a_drift_is_named(drift: Drift, installed: SourceTree, tmp_path: Path) -> None:
    found = check(SGLANG_READS, changed_copy(installed, tmp_path, drift.edits))
    assert [entry.read for entry in found] == [drift.read]
    message = str(found[0])
    assert drift.read in message
    assert drift.expected in found[0].expected
    assert drift.found in found[0].found
    assert found[0].expected in message and found[0].found in message


def test_a_missing_module_is_named(installed: SourceTree, tmp_path: Path) -> None:
    kept = {name: parsed for name, parsed in installed.modules.items() if name != LOGITS}
    found = check(SGLANG_READS, SourceTree(root=tmp_path / "sglang", modules=kept))
    assert {entry.read for entry in found} == {"LogitsProcessor.forward"}
    assert f"expected module {LOGITS}, found no such module" in str(found[0])


def test_the_newer_sglang_is_accepted(installed: SourceTree, tmp_path: Path) -> None:
    """A stand-in of the SGLang whose linear-attention backend hands out the KDA layer cache itself."""
    newer = changed_copy(
        installed,
        tmp_path,
        {
            MEMORY: moving("mamba2_layer_cache", from_class="HybridReqToTokenPool", to_class=None),
            HYBRID: adding(STATE_LAYER_CACHE, to_class="MambaAttnBackendBase"),
        },
    )
    assert check(SGLANG_READS, newer) == []


def test_an_optional_argument_more_is_no_drift(installed: SourceTree, tmp_path: Path) -> None:
    """Only the forward that we implement is closed; of what we call, new arguments with defaults do not matter."""
    edit = replacing(
        r"hidden_states_before_norm: O",
        "extra: int = 0, hidden_states_before_norm: O",
        inside="LogitsProcessor.forward",
    )
    assert check(SGLANG_READS, changed_copy(installed, tmp_path, {LOGITS: edit})) == []
