"""Programs as ONNX models: `to_onnx` and the tables it reads."""
