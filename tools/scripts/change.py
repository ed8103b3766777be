"""Changes one element in a hundred of each tensor, at random."""
import json, random, struct, sys
WIDTH = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "I8": 1, "U8": 1}
data = bytearray(open(sys.argv[1], "rb").read())
start = 8 + struct.unpack("<Q", data[:8])[0]
changed, random = 0, random.Random(1)
for name, tensor in json.loads(data[8:start]).items():
    if name == "__metadata__": continue
    (begin, end), width = tensor["data_offsets"], WIDTH[tensor["dtype"]]
    count = (end - begin) // width
    for index in random.sample(range(count), max(1, count // 100)):
        data[start + begin + index * width] ^= 1
        changed += 1
open(sys.argv[2], "wb").write(data)
print(changed, "elements changed")
