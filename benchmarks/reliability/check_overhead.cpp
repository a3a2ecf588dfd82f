// What a call costs: two ranks, threads of this process, make all_reduces in place, and rank 0
// prints how long each batch took.
//
//     checks TRANSPORT ELEMENTS CALLS BATCHES     -> nanoseconds of a call, a line for each batch
//
// benchmarks/reliability/check_overhead.py links it twice, with the core as it is and without its
// checks.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <thread>
#include <vector>

#include "group/connect.h"
#include "group/group.h"
#include "rendezvous/local_store.h"

namespace {

using namespace pycomm;

struct Batches {
  std::string transport;
  size_t elements;
  int calls, batches;
};

void run_rank(rendezvous::LocalStore& store, int rank, const Batches& what) {
  group::ConnectOptions options;
  options.rank = rank;
  options.size = 2;
  options.name = "checks";
  options.transport = what.transport;
  options.address = "127.0.0.1";
  const auto group = group::connect(store, options);
  std::vector<float> x(what.elements, 0.0F);
  const group::Call call{.operation = Operation::all_reduce,
                         .dtype = Dtype::float32,
                         .input = reinterpret_cast<std::byte*>(x.data()),
                         .output = reinterpret_cast<std::byte*>(x.data()),
                         .count = x.size()};
  for (int batch = 0; batch <= what.batches; ++batch) {
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < what.calls; ++i) group->run(call);
    const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - start;
    if (rank == 0 && batch > 0) std::printf("%.2f\n", took.count() / what.calls);  // 0: warming up
  }
}

// A rank that fails ends the process: the other would wait.
void run_or_end(rendezvous::LocalStore& store, int rank, const Batches& what) {
  try {
    run_rank(store, rank, what);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "checks: rank %d: %s\n", rank, error.what());
    std::_Exit(1);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) {
    std::fprintf(stderr, "usage: checks TRANSPORT ELEMENTS CALLS BATCHES\n");
    return 2;
  }
  const Batches what{argv[1], std::strtoul(argv[2], nullptr, 10), std::atoi(argv[3]),
                     std::atoi(argv[4])};
  rendezvous::LocalStore store;
  std::thread other([&] { run_or_end(store, 1, what); });
  run_or_end(store, 0, what);
  other.join();
  return 0;
}
