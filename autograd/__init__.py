"""Derivatives: jvp, linearize, transpose, partition, and checkpoint schedules."""

if __name__ != "hopflow.autograd":
    raise ImportError(
        f"`{__name__}` is a folder of hopflow, and its name is `hopflow.autograd`: "
        "import that. (The root of the checkout is on sys.path, and need not be.)",
        name=__name__,
    )
