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
