// All-reduce over symmetric memory: ranks on several emulated devices, against the reduction of one
// device in rank order.
#include <atomic>
#include <memory>

#include "cases.hpp"
#include "cuda/symmetric.hpp"

namespace cases {
namespace {

// The code under test.
using namespace pycomm;  // NOLINT(google-build-using-namespace): a program

// A rank with a device, a stream and a region.
struct Rank {
  explicit Rank(int rank, int size) : device(cuda::open_symmetric_device(rank)) {
    check_cuda(cudaSetDevice(rank));
    check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    region = std::make_unique<Device<std::byte>>(device->region_bytes(size));
    check_cuda(cudaMemsetAsync(region->at(), 0, region->size(), cases::stream()));
    cases::finish();
    check_cuda(cudaSetDevice(0));
  }
  void finish() const { check_cuda(cudaStreamSynchronize(stream)); }

  std::shared_ptr<device::SymmetricDevice> device;
  cudaStream_t stream = nullptr;
  std::unique_ptr<Device<std::byte>> region;
  device::SymmetricRegions regions{};
};

class Ranks {
 public:
  explicit Ranks(int size) {
    std::vector<std::byte*> all;
    for (int rank = 0; rank < size; ++rank) {
      ranks_.push_back(std::make_unique<Rank>(rank, size));
      all.push_back(ranks_.back()->region->at());
    }
    for (int rank = 0; rank < size; ++rank)
      (*this)[rank].regions = {.by_rank = all, .rank = rank, .blocks = 2, .aborted = &aborted_};
  }
  Rank& operator[](int rank) { return *ranks_[static_cast<size_t>(rank)]; }
  int size() const { return static_cast<int>(ranks_.size()); }
  void finish() const {
    for (const auto& rank : ranks_) rank->finish();
  }
  void abort() { std::atomic_ref(aborted_).store(1); }

 private:
  uint32_t aborted_ = 0;
  std::vector<std::unique_ptr<Rank>> ranks_;
};

template <class T>
std::vector<T> random_array(std::mt19937& random, Dtype dtype, size_t count) {
  std::vector<T> x(count);
  for (T& one : x) {
    if constexpr (std::is_same_v<T, uint16_t>) {  // finite in float16 and bfloat16
      one = static_cast<T>(0x3c00 + random() % 0x0400 + (random() % 2) * 0x8000);
    } else if constexpr (std::is_floating_point_v<T>) {
      one = static_cast<T>(1) / static_cast<T>(1 + random() % 1000);
    } else {
      one = static_cast<T>(dtype == Dtype::boolean ? random() % 2 : random());
    }
  }
  return x;
}

// One call of all ranks with its arrays; check() once all have run. Rank 0 is in place.
template <class T>
class Call {
 public:
  Call(Ranks& ranks, std::mt19937& random, const device::SymmetricAllReduce& shape, size_t skew)
      : shape_(shape), expected_(shape.count) {
    std::vector<const void*> inputs;
    for (int rank = 0; rank < ranks.size(); ++rank) {
      in_.push_back(std::make_unique<Device<T>>(random_array<T>(random, shape.dtype, shape.count),
                                                (static_cast<size_t>(rank) + skew) % 2));
      out_.push_back(std::make_unique<Device<T>>(shape.count, skew));
      inputs.push_back(in_.back()->at());
    }
    kernels().reduce({expected_.at(), shape.count, shape.dtype}, inputs, shape.op, queue());
    cases::finish();
  }
  void start(Rank& rank, int index) {
    device::SymmetricAllReduce call = shape_;
    call.input = in_[static_cast<size_t>(index)]->at();
    call.output = result(index).at();
    rank.device->all_reduce(rank.regions, call, rank.stream);
  }
  void check() {
    const auto expected = expected_.read();
    for (size_t rank = 0; rank < in_.size(); ++rank)
      cases::check(same_bits(result(static_cast<int>(rank)).read(), expected),
                   "all_reduce of " + std::string(name_of(shape_.dtype)) + ", " +
                       std::string(name_of(shape_.op)) + ", count " + std::to_string(shape_.count) +
                       ", rank " + std::to_string(rank));
  }
  Device<T>& result(int rank) { return rank == 0 ? *in_[0] : *out_[static_cast<size_t>(rank)]; }

 private:
  device::SymmetricAllReduce shape_;
  std::vector<std::unique_ptr<Device<T>>> in_, out_;
  Device<T> expected_;
};

// Calls that follow each other without the host's waiting, as their regions must allow.
template <class T>
void try_calls(Ranks& ranks, std::mt19937& random, Dtype dtype, const std::vector<ReduceOp>& ops,
               const std::vector<size_t>& counts) {
  std::vector<std::unique_ptr<Call<T>>> calls;
  for (const ReduceOp op : ops)
    for (const size_t count : counts)
      calls.push_back(std::make_unique<Call<T>>(
          ranks, random, device::SymmetricAllReduce{.count = count, .dtype = dtype, .op = op},
          calls.size() % 2));
  for (int rank = 0; rank < ranks.size(); ++rank)
    for (const auto& call : calls) call->start(ranks[rank], rank);
  ranks.finish();
  for (const auto& call : calls) call->check();
}

const std::vector<ReduceOp> kForFloats{ReduceOp::sum, ReduceOp::avg, ReduceOp::product,
                                       ReduceOp::min, ReduceOp::max};
const std::vector<ReduceOp> kForIntegers{ReduceOp::sum, ReduceOp::product, ReduceOp::min,
                                         ReduceOp::max, ReduceOp::band,    ReduceOp::bor,
                                         ReduceOp::bxor};

// Just above the largest one-shot array, in elements.
template <class T>
constexpr size_t kTwoShot = device::kOneShotBytes / sizeof(T) + 5;

// A captured call, replayed between others: its rounds continue those of the other calls.
void try_graph(Ranks& ranks, std::mt19937& random) {
  const device::SymmetricAllReduce shape{.count = 700, .dtype = Dtype::float32};
  Call<float> captured(ranks, random, shape, 0), other(ranks, random, shape, 1);
  std::vector<cudaGraphExec_t> graphs(static_cast<size_t>(ranks.size()));
  for (int rank = 0; rank < ranks.size(); ++rank) {
    cudaGraph_t graph = nullptr;
    check_cuda(cudaStreamBeginCapture(ranks[rank].stream, cudaStreamCaptureModeGlobal));
    captured.start(ranks[rank], rank);
    check_cuda(cudaStreamEndCapture(ranks[rank].stream, &graph));
    check_cuda(cudaGraphInstantiate(&graphs[static_cast<size_t>(rank)], graph, 0));
    check_cuda(cudaGraphDestroy(graph));
  }
  for (int rank = 0; rank < ranks.size(); ++rank) {
    check_cuda(cudaGraphLaunch(graphs[static_cast<size_t>(rank)], ranks[rank].stream));
    other.start(ranks[rank], rank);
  }
  ranks.finish();
  captured.check();
  other.check();
  const auto sum = captured.result(0).read();  // now the input of rank 0
  for (int rank = 0; rank < ranks.size(); ++rank)
    check_cuda(cudaGraphLaunch(graphs[static_cast<size_t>(rank)], ranks[rank].stream));
  ranks.finish();
  const auto again = captured.result(0).read();
  check(!same_bits(again, sum), "a repeated graph adds again");
  check(same_bits(captured.result(1).read(), again), "all ranks of a repeated graph");
  for (const cudaGraphExec_t graph : graphs) check_cuda(cudaGraphExecDestroy(graph));
}

// Rank 1 does not call: the call of rank 0 ends when it is aborted, without a result.
void try_abort(std::mt19937& random) {
  Ranks ranks(2);
  Call<float> call(ranks, random, {.count = 300, .dtype = Dtype::float32}, 0);
  const auto before = call.result(0).read();
  call.start(ranks[0], 0);
  ranks.abort();
  ranks.finish();
  check(same_bits(call.result(0).read(), before), "an aborted call has no result");
}

}  // namespace

void run_symmetric(std::mt19937& random) {
  for (const int size : {1, 2, 3, 5}) {
    Ranks ranks(size);
    try_calls<float>(ranks, random, Dtype::float32, kForFloats,
                     {0, 1, 3, 2051, kTwoShot<float>, 9000});
  }
  Ranks ranks(3);
  try_calls<double>(ranks, random, Dtype::float64, kForFloats, {5, 1003});
  try_calls<double>(ranks, random, Dtype::float64, {ReduceOp::sum}, {kTwoShot<double>});
  for (const Dtype half : {Dtype::float16, Dtype::bfloat16}) {
    try_calls<uint16_t>(ranks, random, half, kForFloats, {7, 2051});
    try_calls<uint16_t>(ranks, random, half, {ReduceOp::avg}, {kTwoShot<uint16_t>, 9});
  }
  try_calls<int8_t>(ranks, random, Dtype::int8, kForIntegers, {17, 2051});
  try_calls<int16_t>(ranks, random, Dtype::int16, kForIntegers, {17, 2051});
  try_calls<int32_t>(ranks, random, Dtype::int32, kForIntegers, {17, 2051});
  try_calls<int64_t>(ranks, random, Dtype::int64, kForIntegers, {17, 2051});
  try_calls<uint8_t>(ranks, random, Dtype::uint8, kForIntegers, {17, 2051});
  try_calls<uint8_t>(ranks, random, Dtype::boolean, kForIntegers, {17, 2051});
  try_calls<uint8_t>(ranks, random, Dtype::uint8, {ReduceOp::sum}, {kTwoShot<uint8_t>, 3});
  try_graph(ranks, random);
  try_abort(random);
}

// For the slow sanitizers and mistakes: several rounds of one-shot and two-shot, on two ranks.
void run_symmetric_brief(std::mt19937& random) {
  emulator::options().most_wait_s = 20;
  Ranks ranks(2);
  try_calls<float>(ranks, random, Dtype::float32, {ReduceOp::sum},
                   {700, 2100, kTwoShot<float>, 1, 9000, kTwoShot<float> + 9000, 5});
  try_graph(ranks, random);
  try_abort(random);
}

}  // namespace cases
