// A kernel of one thread that polls a word in host memory. It occupies a block. The driver's
// cuStreamWaitValue32 would occupy a hardware channel, which several streams share, and commands of
// the other streams behind it could not start.
#include "cuda/host.hpp"
#include "cuda/host_word.hpp"

namespace pycomm::cuda {
namespace {

// Between two polls. A poll crosses PCIe, about 1 us, so that longer waits only delay the end.
constexpr unsigned kShortestSleepNs = 64, kLongestSleepNs = 1024;

__global__ void __launch_bounds__(1) wait_for_word(const unsigned* word, unsigned value) {
  for (unsigned ns = kShortestSleepNs; static_cast<int>(gpu::load_acquire_system(word) - value) < 0;
       ns = min(2 * ns, kLongestSleepNs))
    gpu::sleep(ns);
}

}  // namespace

void wait_for_host_word(const uint32_t* word, uint32_t value, kernels::Queue queue) {
  const OnDevice on(queue);
  const gpu::Launch shape{
      .blocks = 1, .threads = 1, .stream = stream_of(queue), .waits_for_host = true};
  launch<wait_for_word>("wait_for_word", shape, word, value);
}

}  // namespace pycomm::cuda
