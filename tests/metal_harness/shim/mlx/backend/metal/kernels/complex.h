// In place of MLX's: complex numbers only as far as MLX's utils.h names them. No kernel here computes with them.
#pragma once
#include <metal_stdlib>

template <typename T>
struct complex_t {
  using value_type = T;
  T real, imag;
  constexpr complex_t(T re, T im) : real(re), imag(im) {}
};
typedef complex_t<float> complex64_t;
