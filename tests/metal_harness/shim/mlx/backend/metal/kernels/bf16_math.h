// In place of MLX's: the functions of this shim take bfloat already.
#pragma once
#include <metal_stdlib>
