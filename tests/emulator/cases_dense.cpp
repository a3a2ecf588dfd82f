// Norms, clipping, products, casts and reductions, on the device as on the CPU.
#include "cases.hpp"

namespace cases {
namespace {

// The code under test.
using namespace pycomm;  // NOLINT(google-build-using-namespace): a program

using Bytes = Twin<std::byte>;

std::string name(const char* what, Dtype dtype, size_t count) {
  return std::string(what) + " of " + std::to_string(count) + " " + std::string(name_of(dtype));
}

void try_norms(std::mt19937& random, Dtype dtype, const std::vector<size_t>& counts) {
  std::vector<std::unique_ptr<Bytes>> all;
  for (const size_t count : counts)
    all.push_back(std::make_unique<Bytes>(as_bytes(numbers(random, count), dtype)));
  Twin<double> norms(counts.size());
  Twin<float> factors(counts.size());
  on_both([&](const Side& side) {
    std::vector<kernels::Array> arrays;
    for (size_t i = 0; i < counts.size(); ++i) arrays.push_back({all[i]->at(side), counts[i]});
    Room room(side, side.kernels.norm_workspace_bytes(arrays));
    side.kernels.norm(arrays, dtype, norms.at(side), room.space(), side.queue);
    side.kernels.clip_scale(norms.at(side), {factors.at(side), counts.size(), Dtype::float32},
                            {.limit = 5, .scale = 2}, side.queue);
  });
  norms.compare(name("norm", dtype, counts.back()));
  factors.compare("clip_scale");
}

// `skew`: elements past an aligned address.
void try_elements(const std::vector<float>& values, Dtype dtype, size_t skew) {
  const size_t count = values.size();
  Bytes x(as_bytes(values, dtype), skew * bytes_of(dtype));
  Twin<std::byte> factor(as_bytes({0.3f}, is_half(dtype) ? Dtype::float32 : dtype));
  for (const Dtype to : kFloats) {
    Bytes out(count * bytes_of(to), skew * bytes_of(to));
    on_both([&](const Side& side) {
      side.kernels.cast({x.at(side), count, dtype}, {out.at(side), count, to}, side.queue);
    });
    out.compare(name("cast", dtype, count) + " to " + std::string(name_of(to)));
  }
  on_both([&](const Side& side) {
    side.kernels.multiply({x.at(side), count, dtype}, factor.at(side), side.queue);
  });
  x.compare(name("multiply", dtype, count));
}

bool defined(Dtype dtype, ReduceOp op) {
  if (op == ReduceOp::avg) return dtype <= Dtype::float64;
  return op < ReduceOp::band || dtype > Dtype::float64;
}

void try_reductions(std::mt19937& random, Dtype dtype, size_t count, size_t skew) {
  const size_t bytes = count * bytes_of(dtype), by = skew * bytes_of(dtype);
  const auto draw = [&] {
    if (dtype <= Dtype::float64) return as_bytes(special_numbers(random, count), dtype);
    std::vector<std::byte> all(bytes);
    for (std::byte& one : all)
      one = static_cast<std::byte>(dtype == Dtype::boolean ? random() % 2 : random());
    return all;
  };
  Bytes x(draw(), by), y(draw(), by), out(bytes, by);
  for (size_t number = 0; number < kReduceOps.size(); ++number) {
    const auto op = static_cast<ReduceOp>(number);
    if (!defined(dtype, op)) continue;
    on_both([&](const Side& side) {
      const std::vector<const void*> all{x.at(side), y.at(side), x.at(side)};
      side.kernels.reduce({out.at(side), count, dtype}, all, op, side.queue);
    });
    out.compare(name("reduce", dtype, count) + " by " + std::string(name_of(op)));
  }
}

}  // namespace

void run_dense(std::mt19937& random) {
  for (const Dtype dtype : kFloats) {
    try_norms(random, dtype, sizes({0, 1, 4097, 9000}));
    for (const size_t count : sizes({1, 3, 2051}))
      for (const size_t skew : {0, 1}) try_elements(special_numbers(random, count), dtype, skew);
  }
  for (size_t dtype = 0; dtype < kDtypes.size(); ++dtype)
    for (const size_t count : sizes({1, 517}))
      for (const size_t skew : {0, 1})
        try_reductions(random, static_cast<Dtype>(dtype), count, skew);
}

}  // namespace cases
