"""Lossless compression of weights on disk.

A weight of 16 bits is two bytes: one that is nearly random (sign and mantissa) and one that takes
few values (the exponent). The second is entropy-coded, in chunks that are encoded and decoded in
parallel; a plane that would not become smaller is stored uncompressed.

    byte_planes             16-bit words as two planes of bytes, and back
    huffman                 one plane of bytes, entropy-coded
    tensor                  a tensor's bytes as planes, and back
    safetensors_layout      the byte layout of a safetensors file
    manifest                the description of a bundle
    shard                   one safetensors file of a bundle
    compress, decompress    a checkpoint folder to a bundle, and back
"""
