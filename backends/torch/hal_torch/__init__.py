"""Plain torch kernels: they run everywhere, and are the last tier."""

from hal.backend import Backend

backend = Backend(
    "torch",
    declarations=(
        "hal_torch.linear",
        "hal_torch.small",
        "hal_torch.mixers",
        "hal_torch.layers",
        "hal_torch.drafts",
    ),
    probe="hal_torch.probe:probe",
)
