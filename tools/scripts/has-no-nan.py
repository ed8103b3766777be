"""Exits with 1 if a float32 of a safetensors file is NaN."""
import array, json, struct, sys
data = open(sys.argv[1], "rb").read()
start = 8 + struct.unpack("<Q", data[:8])[0]
for name, tensor in json.loads(data[8:start]).items():
    if name != "__metadata__" and tensor["dtype"] == "F32":
        begin, end = tensor["data_offsets"]
        if any(value != value for value in array.array("f", data[start + begin:start + end])):
            sys.exit(f"NaN in {name}")
