"""Running ONNX models in onnxruntime, which tests need and the package does not."""

from typing import Any, Final, NamedTuple

import numpy as np

from hopflow.dtypes import as_dtype, bfloat16
from hopflow.testing.requires import load

Array = np.ndarray[Any, Any]

FAILED: Final = "failed_check"


class Outcome(NamedTuple):
    """What a run of a model gives.

    results  the outputs, without that of the checks
    failed   the number of the first check that has failed; 0: none
    """

    results: list[Array]
    failed: int


class Session:
    """A model in onnxruntime, on the CPU.

    It takes and gives bfloat16, which onnxruntime's interface to NumPy lacks, as
    float32: nodes that convert are put at both ends.
    """

    def __init__(self, model: Any) -> None:
        onnx, runtime = load("onnx"), load("onnxruntime")
        own = onnx.ModelProto()
        own.CopyFrom(model)
        self.outputs = [o.name for o in own.graph.output]
        self.inputs = _without_bfloat16(onnx, own.graph)
        options = runtime.SessionOptions()
        options.log_severity_level = 4  # an error is raised, too
        options.intra_op_num_threads = 1
        self.session = runtime.InferenceSession(
            own.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )

    def __call__(self, *arrays: Any) -> Outcome:
        """Run the model on what its inputs get, in order; others have their default."""
        feed = {
            name: np.asarray(a, np.float32) if _is_bfloat16(a) else np.asarray(a)
            for name, a in zip(self.inputs, arrays, strict=False)
        }
        found = self.session.run(None, feed)
        failed = int(found.pop()) if self.outputs[-1:] == [FAILED] else 0
        return Outcome([np.asarray(x) for x in found], failed)


def _is_bfloat16(array: Any) -> bool:
    return as_dtype(np.asarray(array).dtype) is bfloat16


def _without_bfloat16(onnx: Any, graph: Any) -> list[str]:
    """Convert inputs and outputs; returns the names of the inputs."""
    half, single = onnx.TensorProto.BFLOAT16, onnx.TensorProto.FLOAT
    make = onnx.helper.make_node
    for value in graph.input:
        tensor = value.type.tensor_type
        if tensor.elem_type == half:
            wide = f"{value.name}.f32"
            graph.node.insert(0, make("Cast", [wide], [value.name], to=half))
            value.name, tensor.elem_type = wide, single
    for value in graph.output:
        tensor = value.type.tensor_type
        if tensor.elem_type == half:
            wide = f"{value.name}.f32"
            graph.node.append(make("Cast", [value.name], [wide], to=single))
            value.name, tensor.elem_type = wide, single
    return [value.name for value in graph.input]


def difference(found: Array, expected: Array, *, of_largest: bool = False) -> float:
    """The largest difference of floats in units in the last place, of subnormal numbers
    those of the smallest normal one; infinite where shapes, integers, NaNs or
    infinities differ.

    Args:
        of_largest: Whether all are in units of the largest element.
    """
    dtype = as_dtype(expected.dtype)
    if found.shape != expected.shape:
        return np.inf
    if not dtype.is_float:
        same = found.dtype == expected.dtype and np.array_equal(found, expected)
        return 0.0 if same else np.inf
    x, y = (np.asarray(a).astype(np.float64) for a in (found, expected))
    finite = np.isfinite(y)
    if not np.array_equal(x[~finite], y[~finite], equal_nan=True):
        return np.inf
    x, y = x[finite], y[finite]
    if not np.isfinite(x).all():
        return np.inf
    info = _INFO[dtype.short]
    sizes = np.maximum(np.abs(y), info[0])
    units = (np.max(sizes, initial=info[0]) if of_largest else sizes) * info[1]
    return float(np.max(np.abs(x - y) / units, initial=0.0))


_INFO: Final = {
    "f16": (2.0**-14, 2.0**-10),
    "bf16": (2.0**-126, 2.0**-7),
    "f32": (2.0**-126, 2.0**-23),
    "f64": (2.0**-1022, 2.0**-52),
}
