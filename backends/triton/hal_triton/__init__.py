"""Triton kernels that both vendors run."""

from hal.backend import Backend

backend = Backend(
    "triton",
    declarations=(
        "hal_triton.norms",
        "hal_triton.linear",
        "hal_triton.small",
        "hal_triton.rope",
        "hal_triton.attention",
        "hal_triton.moe",
        "hal_triton.gated_delta",
        "hal_triton.conv",
        "hal_triton.drafts",
        "hal_triton.fla",
    ),
)
