// Times of the CUDA kernels on a GPU, as a share of what copies and reads of as many bytes take
// there. Each call is timed alone with events, after a write of more than the L2 cache holds; the
// median counts. Bytes are those that a perfect kernel moves.
#include <functional>
#include <string_view>

#include "cases.hpp"
#include "codec/compact.h"
#include "codec/format.h"

namespace cases {
namespace {

// The code under test.
using namespace pycomm;  // NOLINT(google-build-using-namespace): a program

constexpr size_t kCounts[] = {size_t{1} << 20, 25'600'000, size_t{1} << 28};
constexpr int kRuns = 9;

// Four of them read at once.
__global__ void copy_quads(const float4* from, float4* to, size_t count) {
  const size_t step = size_t{gridDim.x} * blockDim.x;
  size_t i = size_t{blockIdx.x} * blockDim.x + threadIdx.x;
  for (; i + 3 * step < count; i += 4 * step) {
    const float4 a = from[i], b = from[i + step], c = from[i + 2 * step], d = from[i + 3 * step];
    to[i] = a, to[i + step] = b, to[i + 2 * step] = c, to[i + 3 * step] = d;
  }
  for (; i < count; i += step) to[i] = from[i];
}

__global__ void read_quads(const float4* from, float* to, size_t count) {
  const size_t step = size_t{gridDim.x} * blockDim.x;
  size_t i = size_t{blockIdx.x} * blockDim.x + threadIdx.x;
  float sum = 0;
  for (; i + 3 * step < count; i += 4 * step) {
    const float4 a = from[i], b = from[i + step], c = from[i + 2 * step], d = from[i + 3 * step];
    sum += a.x + b.y + c.z + d.w;
  }
  for (; i < count; i += step) sum += from[i].x;
  if (sum == 12345.678f) *to = sum;  // so that the loads stay
}

// Numbers between -1 and 1, of a hash of their index.
__global__ void fill_numbers(float* to, size_t count, unsigned seed) {
  const size_t step = size_t{gridDim.x} * blockDim.x;
  for (size_t i = size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) {
    unsigned x = static_cast<unsigned>(i) * 2654435761u + seed;
    x = (x ^ x >> 16) * 2246822519u;
    x = (x ^ x >> 13) * 3266489917u;
    to[i] = static_cast<float>(static_cast<int>(x ^ x >> 16)) / 2147483648.0f;
  }
}

unsigned blocks() {
  static const unsigned found = [] {
    int count = 0;
    check_cuda(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, 0));
    return static_cast<unsigned>(count) * 8;
  }();
  return found;
}

struct Job {
  std::string name;
  double loaded, stored;  // bytes
  std::function<void()> enqueue;
  std::function<void()> before{};  // untimed, before each run
};

struct Memory {
  Memory() : l2(sized()) {
    for (cudaEvent_t* event : {&begin, &end}) check_cuda(cudaEventCreate(event));
  }
  static size_t sized() {
    int bytes = 0;
    check_cuda(cudaDeviceGetAttribute(&bytes, cudaDevAttrL2CacheSize, 0));
    return 4 * static_cast<size_t>(bytes);
  }
  Device<std::byte> l2;
  cudaEvent_t begin = nullptr, end = nullptr;
};

double median_us(Memory& memory, const Job& job) {
  std::vector<double> all;
  for (int run = -2; run < kRuns; ++run) {
    if (job.before) job.before();
    check_cuda(cudaMemsetAsync(memory.l2.at(), run & 255, memory.l2.size(), stream()));
    check_cuda(cudaEventRecord(memory.begin, stream()));
    job.enqueue();
    check_cuda(cudaEventRecord(memory.end, stream()));
    finish();
    float ms = 0;
    check_cuda(cudaEventElapsedTime(&ms, memory.begin, memory.end));
    if (run >= 0) all.push_back(1000.0 * static_cast<double>(ms));
  }
  std::nth_element(all.begin(), all.begin() + kRuns / 2, all.end());
  return all[kRuns / 2];
}

struct Filled : Device<float> {
  Filled(size_t count, unsigned seed) : Device<float>(count) {
    fill_numbers<<<blocks(), 256, 0, stream()>>>(at(), count, seed);
    check_cuda(cudaGetLastError());
  }
};

// The arrays and arguments of all jobs of one size.
class Jobs {
 public:
  explicit Jobs(size_t n) : count(n), bytes(4.0 * static_cast<double>(n)) {
    add_loops();
    add_dense();
    add_quantize();
    for (const size_t share : {1000, 8}) add_step(share);
    add_selection();
    add_packets();
    add_update();
  }
  const std::vector<Job>& all() const { return jobs; }

 private:
  kernels::TypedArray array(Device<float>& x) const { return {x.at(), count, Dtype::float32}; }
  void add(std::string name, double loaded, double stored, std::function<void()> enqueue,
           std::function<void()> before = {}) {
    jobs.push_back({std::move(name), loaded, stored, std::move(enqueue), std::move(before)});
  }
  template <class T>
  T* keep(size_t elements) {
    auto made = std::make_shared<Device<T>>(elements);
    made->clear();
    kept.push_back(made);
    return made->at();
  }
  kernels::Workspace room(size_t size) { return {keep<std::byte>(size), size}; }

  void add_loops() {
    add("copy", bytes, bytes, [this] {
      copy_quads<<<blocks(), 256, 0, stream()>>>(reinterpret_cast<float4*>(a.at()),
                                                 reinterpret_cast<float4*>(b.at()), count / 4);
    });
    add("read", bytes, 0, [this] {
      read_quads<<<blocks(), 256, 0, stream()>>>(reinterpret_cast<float4*>(a.at()), b.at(),
                                                 count / 4);
    });
  }

  void add_dense() {
    double* norms = keep<double>(1);
    float* factor = keep<float>(1);
    const std::vector<kernels::Array> one{{a.at(), count}};
    const auto space = room(cases::kernels().norm_workspace_bytes(one));
    add("norm", bytes, 0,
        [=] { cases::kernels().norm(one, Dtype::float32, norms, space, queue()); });
    add("multiply", bytes, bytes,
        [=, this] { cases::kernels().multiply(array(b), factor, queue()); });
    add("cast_bfloat16", bytes, bytes / 2,
        [=, this] { cases::kernels().cast(array(a), {b.at(), count, Dtype::bfloat16}, queue()); });
    add("reduce_2", 2 * bytes, bytes, [this] {
      const std::vector<const void*> both{a.at(), b.at()};
      cases::kernels().reduce(array(c), both, ReduceOp::sum, queue());
    });
  }

  void add_quantize() {
    for (size_t first = 0; first < count; first += codec::kValueBlock)
      table.push_back({first, std::min(codec::kValueBlock, count - first)});
    const kernels::Blocks blocks{table, 3};
    const size_t packet_bytes = quantized_bytes(blocks);
    std::byte* packet = keep<std::byte>(packet_bytes);
    const auto moved = static_cast<double>(packet_bytes);
    add("quantize_3", 2 * bytes, bytes + moved, [=, this] {
      cases::kernels().quantize(array(a), blocks, {c.at(), c.at()}, packet, queue());
    });
    add("dequantize_3", moved, bytes, [=, this] {
      cases::kernels().dequantize(packet, blocks, {1.0f, false, nullptr}, array(d), queue());
    });
  }

  // 1 in `share`: with the threshold of the step before, and without; dense if 1 in 8.
  void add_step(size_t share) {
    const size_t k = count / share;
    pieces.assign(1, {a.at(), nullptr, c.at(), d.at(), count});
    auto selections = std::make_shared<std::vector<kernels::DgcSelection>>();
    selections->push_back({1, k, 0, keep<int32_t>(k), keep<float>(k), keep<float>(k)});
    const kernels::DgcTables tables{pieces, *selections, Dtype::float32};
    const auto space = room(cases::kernels().dgc_workspace_bytes(tables));
    const auto step = [=] {
      static_cast<void>(selections);  // kept
      cases::kernels().dgc_step({.tables = tables,
                                 .grad_dtype = Dtype::float32,
                                 .weight_dtype = Dtype::float32,
                                 .momentum = 0.9,
                                 .weight_decay = 0,
                                 .scale = 1,
                                 .scales = nullptr,
                                 .nesterov = false,
                                 .masking = true,
                                 .found_inf = nullptr,
                                 .workspace = space},
                                queue());
    };
    const auto forget = [=] { check_cuda(cudaMemsetAsync(space.data, 0, space.bytes, stream())); };
    const std::string name = share > 16 ? "dgc_step" : "dgc_step_dense";
    add(name + "_warm", 3 * bytes, 2 * bytes, step);
    add(name + "_cold", 3 * bytes, 2 * bytes, step, forget);
  }

  void add_selection() {
    const size_t k = count / 1000;
    const auto space = room(cases::kernels().topk_workspace_bytes(count, k, Dtype::float32));
    int32_t* indices = keep<int32_t>(k);
    float* values = keep<float>(k);
    add("topk", bytes, 0, [=, this] {
      cases::kernels().topk(
          array(a),
          {.k = k, .indices = indices, .values = values, .threshold = nullptr, .workspace = space},
          queue());
    });
  }

  // Of eight ranks, with the largest thousandth of a.
  void add_packets() {
    const size_t k = count / 1000;
    int32_t* indices = keep<int32_t>(k);
    float* values = keep<float>(k);
    const auto space = room(cases::kernels().topk_workspace_bytes(count, k, Dtype::float32));
    const auto select = [=, this] {
      cases::kernels().topk(
          array(a),
          {.k = k, .indices = indices, .values = values, .threshold = nullptr, .workspace = space},
          queue());
    };
    select();
    const std::vector<codec::Packet> packets(8, codec::Packet{indices, values, k});
    const std::vector<kernels::Array> to{{b.at(), count}};
    const double moved = 8.0 * static_cast<double>(k);
    add("decode_sum_8", 8 * moved, bytes, [=] {
      cases::kernels().decode_sum({to, Dtype::float32}, packets, Dtype::float32, 0.125, queue());
    });
    add("decode_update_8", 8 * moved + 0.5 * moved, 0.5 * moved, [=] {
      cases::kernels().decode_update({to, Dtype::float32}, packets, Dtype::float32,
                                     {.lr = 0.1, .scale = 0.125}, queue());
    });
    const codec::CompactCodes how{Dtype::float32, true, codec::IndexCode::list,
                                  codec::ValueCode::three_bit};
    const size_t most = codec::most_compact_bytes(k, count, 1, how);
    std::byte* out = keep<std::byte>(most);
    uint64_t* size = keep<uint64_t>(1);
    const Source from{indices, values, k, 0, count, nullptr, out};
    const auto writing = room(cases::kernels().compact_encoding_bytes({&from, 1}, {how, 1, {}}));
    const auto encode = [=] {
      cases::kernels().encode_compact({&from, 1}, {how, 1, {}}, {size, writing}, queue());
    };
    encode();
    uint64_t coded = 0;
    check_cuda(cudaMemcpyAsync(&coded, size, 8, cudaMemcpyDefault, stream()));
    finish();
    uint32_t* refused = keep<uint32_t>(1);
    int32_t* found = keep<int32_t>(k);
    float* read = keep<float>(k);
    const DeviceCompactPacket packet{out, coded, k, 0, count};
    const auto reading = room(cases::kernels().compact_decoding_bytes({&packet, 1}, 1));
    add("encode_compact", moved, static_cast<double>(coded), encode);
    add("decode_compact", static_cast<double>(coded), moved, [=] {
      cases::kernels().decode_compact({&packet, 1}, {1, found, read, refused, reading}, queue());
    });
  }

  void add_update() {
    constexpr size_t kGroup = 16;
    const size_t groups = count / kGroup, k = groups / 100;
    updates.assign(1, {a.at(), b.at(), c.at(), count});
    const auto space = room(cases::kernels().group_workspace_bytes({1, groups, k}));
    const kernels::LargestGroups largest{kGroup, k, keep<int32_t>(k), keep<float>(k), space};
    add("update_step", 3 * bytes, 2 * bytes,
        [=, this] { cases::kernels().update_step(updates, Dtype::float32, largest, queue()); });
    tensors.assign(1, {c.at(), count});
    const codec::CompactCodes codes{Dtype::float32, true, codec::IndexCode::list,
                                    codec::ValueCode::three_bit};
    const kernels::DeviceKernels::CompactInput input{codes, kGroup, tensors};
    std::byte* out = keep<std::byte>(codec::most_compact_bytes(k, groups, kGroup, codes));
    const Source from{largest.indices, keep<float>(k * kGroup), k, 0, groups, nullptr, out};
    uint64_t* size = keep<uint64_t>(1);
    const auto writing = room(cases::kernels().compact_encoding_bytes({&from, 1}, input));
    const double moved = 4.0 * static_cast<double>(k * kGroup);
    add("encode_groups", moved, moved,
        [=] { cases::kernels().encode_compact({&from, 1}, input, {size, writing}, queue()); });
  }

  using DeviceCompactPacket = kernels::DeviceKernels::CompactPacket;
  using Source = kernels::DeviceKernels::CompactSource;
  size_t count;
  double bytes;
  Filled a{count, 1}, b{count, 2}, c{count, 3}, d{count, 4};
  std::vector<kernels::Block> table;
  std::vector<kernels::DgcPiece> pieces;
  std::vector<kernels::UpdatePiece> updates;
  std::vector<kernels::Array> tensors;
  std::vector<std::shared_ptr<void>> kept;
  std::vector<Job> jobs;
};

}  // namespace

int time_kernels(const std::vector<std::string_view>& names) {
  Memory memory;
  cudaDeviceProp device{};
  check_cuda(cudaGetDeviceProperties(&device, 0));
  std::printf("{\"device\": \"%s\", \"multiprocessors\": %d, \"l2_bytes\": %d}\n", device.name,
              device.multiProcessorCount, device.l2CacheSize);
  std::string table;
  for (const size_t count : kCounts) {
    if (count > kCounts[0] && !large()) break;
    Jobs jobs(count);
    double copy = 0, read = 0;  // bytes in a microsecond
    for (const Job& job : jobs.all()) {
      const bool loop = job.name == "copy" || job.name == "read";
      if (!loop && !names.empty() && std::ranges::find(names, job.name) == names.end()) continue;
      const double us = median_us(memory, job);
      if (job.name == "copy") copy = (job.loaded + job.stored) / us;
      if (job.name == "read") read = job.loaded / us;
      // The bytes that are stored, and as many that are loaded, at the rate of a copy.
      const double both = 2 * std::min(job.loaded, job.stored);
      const double rest = job.loaded + job.stored - both;
      const double limit = job.name == "copy" ? us : both / copy + rest / read;
      char line[160];
      std::snprintf(line, sizeof line,
                    "{\"kernel\": \"%s\", \"count\": %zu, \"us\": %.1f, \"limit_us\": %.1f, "
                    "\"percent\": %.0f}\n",
                    job.name.c_str(), count, us, limit, 100 * limit / us);
      std::printf("%s", line);
      std::fflush(stdout);
      std::snprintf(line, sizeof line, "%-20s %10zu %10.1f us %6.0f %%\n", job.name.c_str(), count,
                    us, 100 * limit / us);
      table += line;
    }
  }
  std::printf("%s", table.c_str());
  return 0;
}

}  // namespace cases
