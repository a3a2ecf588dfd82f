// Norms, clipping, products, casts, reductions and the loops that only move memory, against loops.
#include <memory>

#include "cases.hpp"

namespace cases {
namespace {

// The code under test.
using namespace pycomm;  // NOLINT(google-build-using-namespace): a program

void try_norms(std::mt19937& random) {
  std::vector<std::unique_ptr<Device<float>>> on_device;
  std::vector<kernels::Array> arrays;
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

// Integers wrap, and have other loads than floats; `skew` as of the quads.
template <class T>
void try_integers(std::mt19937& random, Dtype dtype, size_t skew) {
  constexpr size_t kCount = 517;
  std::vector<T> x(kCount), y(kCount);
  for (size_t i = 0; i < kCount; ++i) {
    x[i] = static_cast<T>(random() % 2);
    y[i] = dtype == Dtype::boolean ? static_cast<T>(random() % 2) : static_cast<T>(random());
  }
  Device<T> a(x, skew), b(y, skew), out(kCount, skew);
  const std::vector<const void*> both{a.at(), b.at()};
  const auto reduced = [&](ReduceOp op) {
    kernels().reduce({out.at(), kCount, dtype}, both, op, queue());
    return out.read();
  };
  const auto sum = reduced(ReduceOp::sum), product = reduced(ReduceOp::product);
  const auto least = reduced(ReduceOp::min), most = reduced(ReduceOp::max);
  const auto both_bits = reduced(ReduceOp::band), any_bit = reduced(ReduceOp::bor);
  const auto other_bits = reduced(ReduceOp::bxor);
  for (size_t i = 0; i < kCount; ++i) {
    const T wrapped = dtype == Dtype::boolean ? static_cast<T>(x[i] | y[i])
                                              : static_cast<T>(uint64_t(x[i]) + uint64_t(y[i]));
    check(sum[i] == wrapped, "reduce sum of integers");
    check(product[i] == static_cast<T>(x[i] * y[i]), "reduce product of integers");
    check(least[i] == std::min(x[i], y[i]) && most[i] == std::max(x[i], y[i]), "reduce min, max");
    check(both_bits[i] == static_cast<T>(x[i] & y[i]), "reduce band");
    check(any_bit[i] == static_cast<T>(x[i] | y[i]), "reduce bor");
    check(other_bits[i] == static_cast<T>(x[i] ^ y[i]), "reduce bxor");
  }
}

// A round trip keeps every 16-bit value, through any wider dtype.
void try_halves(std::mt19937& random, Dtype half, size_t skew) {
  constexpr size_t kCount = 517;
  std::vector<float> x(kCount);
  for (float& one : x) one = static_cast<float>(random() % 256) / 16 - 8;  // exact in either
  x[3] = std::nanf("");
  Device<float> from(x, skew), back(kCount, skew);
  Device<uint16_t> between(kCount, skew);
  Device<double> wide(kCount, skew);
  const auto cast = [](kernels::TypedArray a, kernels::TypedArray b) {
    kernels().cast(a, b, queue());
  };
  cast({from.at(), kCount, Dtype::float32}, {between.at(), kCount, half});
  cast({between.at(), kCount, half}, {wide.at(), kCount, Dtype::float64});
  cast({wide.at(), kCount, Dtype::float64}, {between.at(), kCount, half});
  cast({between.at(), kCount, half}, {back.at(), kCount, Dtype::float32});
  check(same_bits(back.read(), x), "cast to 16 bits and back");
}

}  // namespace

void run_dense(std::mt19937& random) {
  try_norms(random);
  for (const size_t count : {1, 3, 2051}) {
    try_elements(random, count, 0);
    try_elements(random, count, 1);
  }
  for (const size_t skew : {0, 1}) {
    try_integers<int8_t>(random, Dtype::int8, skew);
    try_integers<int16_t>(random, Dtype::int16, skew);
    try_integers<int32_t>(random, Dtype::int32, skew);
    try_integers<int64_t>(random, Dtype::int64, skew);
    try_integers<uint8_t>(random, Dtype::uint8, skew);
    try_integers<uint8_t>(random, Dtype::boolean, skew);
    try_halves(random, Dtype::float16, skew);
    try_halves(random, Dtype::bfloat16, skew);
  }
}

}  // namespace cases
