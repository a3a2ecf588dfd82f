// What a call costs: two ranks, threads of this process, make all_reduces in place, and rank 0
// prints how long each batch took, but the first. An error of a rank ends the process.
//
//     checks TRANSPORT ELEMENTS CALLS BATCHES     -> nanoseconds of a call, a line for each batch
//
// benchmarks/reliability/check_overhead.py links it twice, with the core as it is and without its
// checks.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "group/group.h"
#include "ranks.h"

int main(int argc, char** argv) {
  if (argc != 5) return 2;
  const size_t elements = std::strtoul(argv[2], nullptr, 10);
  const int calls = std::atoi(argv[3]), batches = std::atoi(argv[4]);
  ranks::run_groups(2, argv[1], [&](pycomm::group::Group& group) {
    std::vector<float> x(elements, 0.0F);
    const pycomm::group::Call call{.operation = pycomm::Operation::all_reduce,
                                   .dtype = pycomm::Dtype::float32,
                                   .input = reinterpret_cast<std::byte*>(x.data()),
                                   .output = reinterpret_cast<std::byte*>(x.data()),
                                   .count = x.size()};
    for (int batch = 0; batch <= batches; ++batch) {
      const auto start = std::chrono::steady_clock::now();
      for (int i = 0; i < calls; ++i) group.run(call);
      const std::chrono::duration<double, std::nano> took =
          std::chrono::steady_clock::now() - start;
      if (group.rank() == 0 && batch > 0) std::printf("%.2f\n", took.count() / calls);
    }
  });
  return 0;
}
