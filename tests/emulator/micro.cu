// One small kernel per kind of mistake, with and without it: the errors that the emulator must
// report, and correct code that it must accept.
//
//     micro NAME good|bad forward|reverse|random SEED ...
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "gpu.hpp"

namespace {

constexpr unsigned kThreads = 64;

struct Tile {
  float at[kThreads];
};
struct alignas(16) Four {
  float at[4];
};
struct Buffers {
  float* in;
  float* out;
  unsigned* flags;
};

template <bool kBad>
__global__ void barrier(Buffers b) {  // neighbours read before all threads wrote
  auto& tile = gpu::shared<Tile>();
  tile.at[threadIdx.x] = b.in[threadIdx.x];
  if (!kBad) __syncthreads();
  b.out[threadIdx.x] = tile.at[kThreads - 1 - threadIdx.x];
}

template <bool kBad>
__global__ void warp_order(Buffers b) {  // a shuffle orders no memory
  auto& tile = gpu::shared<Tile>();
  tile.at[threadIdx.x] = b.in[threadIdx.x];
  if (kBad) {
    static_cast<void>(__shfl_sync(gpu::kFullWarp, 0, 0));
  } else {
    __syncwarp();
  }
  b.out[threadIdx.x] = tile.at[threadIdx.x ^ 31u];
}

template <bool kBad>
__global__ void total(Buffers b) {  // blocks add to one place
  if (threadIdx.x != 0) return;
  if (kBad) {
    b.out[0] += b.in[1];
  } else {
    atomicAdd(&b.out[0], b.in[1]);
  }
}

template <bool kBad>
__global__ void flag(Buffers b) {  // data behind a flag that publishes nothing
  if (threadIdx.x != 0) return;
  if (atomicAdd(&b.flags[1], 1u) == 0) {
    b.out[0] = b.in[3];
    if (kBad) {
      atomicExch(&b.flags[0], 1u);
    } else {
      gpu::store_release(&b.flags[0], 1u);
    }
    return;
  }
  while (gpu::load_acquire(&b.flags[0]) == 0) gpu::pause();
  b.out[1] = b.out[0];
}

template <bool kBad>
__global__ void divergent(Buffers b) {  // some threads wait at another barrier
  if (kBad && threadIdx.x < 7) {
    __syncthreads();
  } else {
    __syncthreads();
  }
  b.out[threadIdx.x] = b.in[threadIdx.x];
}

template <bool kBad>
__global__ void stuck(Buffers b) {  // half a warp leaves, the other half waits for it
  if (kBad && threadIdx.x % 2 == 0) {
    static_cast<void>(__ballot_sync(gpu::kFullWarp, 1));
    __syncthreads();
  } else if (!kBad) {
    static_cast<void>(__ballot_sync(gpu::kFullWarp, 1));
    __syncthreads();
  } else {
    __syncthreads();
  }
  b.out[threadIdx.x] = b.in[threadIdx.x];
}

template <bool kBad>
__global__ void mask(Buffers b) {  // a lane outside its own mask
  b.out[threadIdx.x] = __shfl_sync(kBad ? 0xffffu : gpu::kFullWarp, b.in[threadIdx.x], 3);
}

template <bool kBad>
__global__ void spinning(Buffers b) {  // waits for a flag that no thread sets
  if (threadIdx.x != 0) return;
  if (blockIdx.x == 0) {
    while (gpu::load_acquire(&b.flags[0]) == 0) gpu::pause();
  } else if (!kBad) {
    gpu::store_release(&b.flags[0], 1u);
  }
}

template <bool kBad>
__global__ void poison(Buffers b) {  // one element is never written
  auto& tile = gpu::shared<Tile>();
  if (!kBad || threadIdx.x != 7) tile.at[threadIdx.x] = b.in[threadIdx.x];
  __syncthreads();
  b.out[threadIdx.x] = tile.at[threadIdx.x];
}

template <bool kBad>
__global__ void overflow(Buffers b) {  // one element too far
  b.out[threadIdx.x + (kBad ? 1 : 0)] = b.in[threadIdx.x];
}

template <bool kBad>
__global__ void shared_overflow(Buffers b) {
  float* tile = gpu::dynamic_shared<float>();
  tile[threadIdx.x + (kBad ? 1 : 0)] = b.in[threadIdx.x];
  __syncthreads();
  b.out[threadIdx.x] = b.in[threadIdx.x];
}

template <bool kBad>
__global__ void misaligned(Buffers b) {
  const float* from = b.in + (kBad ? 1 : 0);
  if (threadIdx.x == 0)
    *reinterpret_cast<Four*>(b.out) = gpu::load(reinterpret_cast<const Four*>(from));
}

template <bool kBad>
__global__ void fill(Buffers b) {
  b.in[threadIdx.x] = 5.f;
}

void check(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::printf("%s\n", cudaGetErrorString(error));
  std::exit(3);
}

template <bool kBad>
int run(const std::string& name) {
  Buffers b{};
  std::vector<float> host(kThreads), result(kThreads);
  for (unsigned i = 0; i < kThreads; ++i) host[i] = static_cast<float>(i);
  void* p = nullptr;
  check(cudaMalloc(&p, kThreads * 4));
  b.in = static_cast<float*>(p);
  check(cudaMalloc(&p, kThreads * 4));
  b.out = static_cast<float*>(p);
  check(cudaMalloc(&p, 8));
  b.flags = static_cast<unsigned*>(p);
  cudaStream_t first, second;
  check(cudaStreamCreateWithFlags(&first, cudaStreamNonBlocking));
  check(cudaStreamCreateWithFlags(&second, cudaStreamNonBlocking));
  check(cudaMemsetAsync(b.flags, 0, 8, first));
  check(cudaMemsetAsync(b.out, 0, kThreads * 4, first));
  check(cudaMemcpyAsync(b.in, host.data(), kThreads * 4, cudaMemcpyHostToDevice, first));
  const gpu::Launch one{1, kThreads, first, kThreads * 4}, many{6, 32, first};
  if (name == "barrier") check(gpu::launch(barrier<kBad>, one, b));
  if (name == "warp_order") check(gpu::launch(warp_order<kBad>, one, b));
  if (name == "total") check(gpu::launch(total<kBad>, many, b));
  if (name == "flag") check(gpu::launch(flag<kBad>, {2, 32, first}, b));
  if (name == "divergent") check(gpu::launch(divergent<kBad>, one, b));
  if (name == "stuck") check(gpu::launch(stuck<kBad>, one, b));
  if (name == "mask") check(gpu::launch(mask<kBad>, one, b));
  if (name == "spinning") check(gpu::launch(spinning<kBad>, many, b));
  if (name == "poison") check(gpu::launch(poison<kBad>, one, b));
  if (name == "overflow") check(gpu::launch(overflow<kBad>, one, b));
  if (name == "shared_overflow") check(gpu::launch(shared_overflow<kBad>, one, b));
  if (name == "misaligned") check(gpu::launch(misaligned<kBad>, one, b));
  if (name == "event") {  // the second stream must wait for the first
    cudaEvent_t event;
    check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    check(gpu::launch(fill<kBad>, one, b));
    check(cudaEventRecord(event, first));
    if (!kBad) check(cudaStreamWaitEvent(second, event, 0));
    check(gpu::launch(barrier<false>, {1, kThreads, second}, b));
    check(cudaStreamSynchronize(second));
  }
  if (name == "host" && kBad) std::printf("%g\n", b.in[9]);  // before anything has run
  if (name == "capture") {                                   // what a graph cannot hold
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;
    check(cudaStreamSynchronize(first));
    check(cudaStreamBeginCapture(first, cudaStreamCaptureModeGlobal));
    check(gpu::launch(barrier<false>, one, b));
    if (kBad) static_cast<void>(cudaStreamSynchronize(first));
    check(cudaStreamEndCapture(first, &graph));
    check(cudaGraphInstantiate(&exec, graph, 0));
    for (int i = 0; i < 3; ++i) check(cudaGraphLaunch(exec, first));
  }
  check(cudaMemcpyAsync(result.data(), b.out, kThreads * 4, cudaMemcpyDeviceToHost, first));
  check(cudaDeviceSynchronize());
  float sum = 0;
  for (float x : result) sum += x;
  std::printf("%s sum %.9g\n", name.c_str(), static_cast<double>(sum));
  return sum != sum;  // poison is a NaN
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) return 2;
  auto& options = emulator::options();
  options.most_spins = 100000;
  int status = 0;
  for (int i = 3; i < argc && status == 0; ++i) {
    const std::string order = argv[i];
    options.order = order == "reverse"  ? emulator::Order::reverse
                    : order == "random" ? emulator::Order::random
                                        : emulator::Order::forward;
    if (order == "random" && ++i < argc) options.seed = std::strtoull(argv[i], nullptr, 10);
    status = std::strcmp(argv[2], "bad") == 0 ? run<true>(argv[1]) : run<false>(argv[1]);
  }
  return status;
}
