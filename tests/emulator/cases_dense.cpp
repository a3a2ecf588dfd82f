// Norms, clipping, products, casts, reductions and the loops that only move memory, against loops.
#include <memory>

#include "cases.hpp"
#include "cuda/cuda_kernels.h"
#include "cuda/stream.h"

namespace cases {
namespace {

// What is under test, all of it.
using namespace pycomm;  // NOLINT(google-build-using-namespace): a program

cuda::CudaKernels& kernels() {
  static cuda::CudaKernels all;
  return all;
}

void try_norms(std::mt19937& random) {
  std::vector<std::unique_ptr<Device<float>>> on_device;
  std::vector<Array> arrays;
  std::vector<double> expected;
  for (const size_t count : {size_t{0}, size_t{1}, size_t{4097}, size_t{9000}}) {
    const auto x = numbers(random, count);
    on_device.push_back(std::make_unique<Device<float>>(x));
    arrays.push_back({on_device.back()->at(), count});
    double sum = 0;
    for (const float one : x) sum += static_cast<double>(one) * one;
    expected.push_back(std::sqrt(sum));
  }
  Device<double> norms(arrays.size());
  Device<float> factors(arrays.size());
  Device<std::byte> workspace(kernels().norm_workspace_bytes(arrays));
  kernels().norm(arrays, Dtype::float32, norms.at(), {workspace.at(), workspace.size()}, queue());
  kernels().clip_scale(norms.at(), {factors.at(), arrays.size(), Dtype::float32},
                       {.limit = 5, .scale = 2}, queue());
  const auto found = norms.read();
  const auto scales = factors.read();
  for (size_t i = 0; i < arrays.size(); ++i) {
    check(std::abs(found[i] - expected[i]) <= 1e-12 * expected[i], "norm");
    const double clipped = found[i] > 5 ? 2 * (5 / found[i]) : 2;
    check(scales[i] == static_cast<float>(clipped), "clip_scale");
  }
}

void try_elements(std::mt19937& random, size_t count, size_t skew) {
  const auto x = numbers(random, count), y = numbers(random, count);
  Device<float> a(x, skew), b(y, skew), out(count, skew), by(std::vector<float>{0.3f});
  Device<double> wide(count);
  kernels().cast({a.at(), count, Dtype::float32}, {wide.at(), count, Dtype::float64}, queue());
  const std::vector<const void*> both{a.at(), b.at(), a.at()};
  kernels().reduce({out.at(), count, Dtype::float32}, both, ReduceOp::avg, queue());
  const auto mean = out.read();
  kernels().reduce({out.at(), count, Dtype::float32}, both, ReduceOp::max, queue());
  kernels().multiply({a.at(), count, Dtype::float32}, by.at(), queue());
  const auto most = out.read(), product = a.read();
  const auto doubled = wide.read();
  for (size_t i = 0; i < count; ++i) {
    check(mean[i] == (x[i] + y[i] + x[i]) / 3, "reduce avg");
    check(most[i] == std::max(x[i], y[i]), "reduce max");
    check(product[i] == x[i] * 0.3f, "multiply");
    check(doubled[i] == static_cast<double>(x[i]), "cast");
  }
}

// Sizes with and without a part of a tile at the end.
void try_streams(std::mt19937& random, size_t count) {
  const auto x = numbers(random, count), y = numbers(random, count), z = numbers(random, count);
  Device<float> grad(x), u(y), v(z), copy(count);
  Device<unsigned> most(1);
  most.clear();
  cuda::stream_copy(grad.at(), copy.at(), count, queue());
  cuda::stream_step(grad.at(), u.at(), v.at(), count, queue());
  cuda::stream_read(u.at(), count, most.at(), queue());
  const auto moved = u.read(), summed = v.read();
  check(same_bits(copy.read(), x), "stream_copy");
  float largest = 0;
  for (size_t i = 0; i < count; ++i) {
    check(moved[i] == y[i] + x[i] && summed[i] == z[i] + moved[i], "stream_step");
    largest = std::max(largest, std::abs(moved[i]));
  }
  unsigned bits;
  std::memcpy(&bits, &largest, sizeof bits);
  check(most.read()[0] == bits, "stream_read");
}

}  // namespace

void run_dense(std::mt19937& random) {
  try_norms(random);
  for (const size_t count : {1, 3, 2051}) {
    try_elements(random, count, 0);
    try_elements(random, count, 1);
  }
  for (const size_t count : {0, 1, 4096, 9001}) try_streams(random, count);
}

}  // namespace cases
