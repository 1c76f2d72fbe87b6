"""Lossless coding of weights at rest.

A weight of 16 bits is two bytes: one that is as good as random (sign and mantissa) and one that
takes few values (the exponent). The second is entropy-coded, in chunks that are coded and decoded
side by side; what does not become smaller is kept as it is.

    planes      16-bit words as two planes of bytes, and back
    huffman     one plane of bytes, entropy-coded
    tensor      a tensor's bytes as planes, and back
    layout      what lies where in a safetensors file
    manifest    what a bundle says of itself
    shard       one safetensors file of a bundle
    compress, decompress    a checkpoint's folder to a bundle's, and back
"""
