"""Is the model that SGLang has loaded the one whose weights we read?"""

from __future__ import annotations

from typing import Any


def foreign_model_reason(model: Any) -> str | None:
    """Why a loaded model is not SGLang's own GLM-5.3-Flash with its language part, or None where it is.

    Args:
        model: the `torch.nn.Module` that SGLang has loaded; another package may have replaced its class.
    """
    from sglang.srt.models.glm5_next import Glm5NextForConditionalGeneration as Expected

    if type(model) is not Expected:
        found = f"{type(model).__module__}.{type(model).__qualname__}"
        return f"the model is a {found}, and a step reads {Expected.__module__}.{Expected.__qualname__}"
    if model.model is None:
        return "the model was loaded without its language part"
    return None
