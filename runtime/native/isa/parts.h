// Kernels in translation units of their own, so that compilers run side by side. Contracts: core/kernels.h. table.cpp is the only reader
// besides those units. Guards: those of the .cpp files.
#pragma once

#include "../core/kernels.h"

namespace headrace::HEADRACE_ISA {

// bands.cpp
void multiply(const Matrix& w, const float* x, int64_t ldx, int64_t batch, int64_t row, int64_t rows, float* y,
              int64_t ldy, const Upcoming& next);

// tiles.cpp, with AVX-512 only
void multiply_amx(const Matrix& w, const float* x, int64_t ldx, int64_t batch, int64_t row, int64_t rows, float* y, int64_t ldy);
void multiply_emulated(const Matrix& w, const float* x, int64_t ldx, int64_t batch, int64_t row, int64_t rows, float* y, int64_t ldy);

// floats.cpp
void multiply_floats(const Matrix& w, const float* x, int64_t stride, int64_t batch, int64_t row, int64_t rows,
                     float* y, int64_t ldy);

// packed.cpp
void pack_key(const float* row, int64_t dim, const Packing& packing, int64_t entry, char* keys);
void pack_value(const float* row, int64_t dim, const Packing& packing, int64_t entry, char* values);
void unpack_keys(const char* keys, int64_t dim, const Packing& packing, int64_t begin, int64_t n, float* out);
void unpack_values(const char* values, int64_t dim, const Packing& packing, int64_t begin, int64_t n, float* out);
void attend_packed(const Chunk& chunk, const Packings& packings, int64_t dim, const float* const* q, int64_t queries, ScoreRule rule,
                   float* scores, Softmax* states);

}  // namespace headrace::HEADRACE_ISA
