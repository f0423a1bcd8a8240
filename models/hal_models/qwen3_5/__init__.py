"""Qwen3.5: a hybrid of Gated DeltaNet and full attention, dense or with experts."""

from hal.family import Family
from hal_models.qwen3_5.published import PUBLISHED

CODE = "hal_models.qwen3_5"
VERBS = "hal_models.commands"

family = Family(
    "qwen3_5",
    published=tuple(PUBLISHED),
    config=f"{CODE}.config:configure",
    build=f"{CODE}.model:Qwen35",
    scheme=f"{CODE}.config:quantized",
    commands=(
        ("generate", f"{VERBS}.generate:arguments", f"{VERBS}.generate:run", "continue a prompt with a checkpoint"),
        (
            "accuracy",
            f"{VERBS}.accuracy:arguments",
            f"{VERBS}.accuracy:run",
            "score a tiny checkpoint on its tasks",
        ),
        (
            "quantize",
            f"{VERBS}.quantize:arguments",
            f"{VERBS}.quantize:run",
            "write a quantized checkpoint from one that is not",
        ),
        (
            "bench e2e",
            f"{VERBS}.bench_e2e:arguments",
            f"{VERBS}.bench_e2e:run",
            "decode steps and a long prefill of a whole model, here",
        ),
        ("demo", f"{VERBS}.demo:arguments", f"{VERBS}.demo:run", "run the shipped checkpoint on a few lines"),
    ),
)
