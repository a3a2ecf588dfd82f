// topk and the DGC step, on the device as on the CPU.
#include "cases.hpp"

namespace cases {
namespace {

// The code under test.
using namespace pycomm;  // NOLINT(google-build-using-namespace): a program

void try_topk(const std::vector<float>& values, size_t k, size_t skew,
              Dtype dtype = Dtype::float32) {
  const size_t count = values.size();
  Twin<std::byte> x(as_bytes(values, dtype), skew * bytes_of(dtype)), found(k * bytes_of(dtype)),
      threshold(bytes_of(dtype));
  Twin<int32_t> indices(k);
  on_both([&](const Side& side) {
    Room room(side, side.kernels.topk_workspace_bytes(count, k, dtype));
    side.kernels.topk({x.at(side), count, dtype},
                      {.k = k,
                       .indices = indices.at(side),
                       .values = found.at(side),
                       .threshold = k == 0 ? nullptr : threshold.at(side),
                       .workspace = room.space()},
                      side.queue);
  });
  const std::string which = "topk " + std::to_string(k) + " of " + std::to_string(count);
  indices.compare(which + ": indices");
  found.compare(which + ": values");
  threshold.compare(which + ": threshold");
}

struct Setting {
  bool nesterov, decay, masking, model;
  Dtype grad = Dtype::float32, state = Dtype::float32;
};

// One tensor of a step.
struct Tensor {
  Tensor(std::mt19937& random, size_t elements, size_t skew, const Setting& how)
      : count(elements),
        grad(elements * bytes_of(how.grad), skew * bytes_of(how.grad)),
        weight(as_bytes(numbers(random, elements), how.grad), skew * bytes_of(how.grad)),
        u(as_bytes(numbers(random, elements), how.state), skew * bytes_of(how.state)),
        v(as_bytes(numbers(random, elements), how.state), skew * bytes_of(how.state)) {}

  size_t count;
  Twin<std::byte> grad, weight, u, v;
};

// The selections of a step: one for each tensor, or one for all of them.
struct Steps {
  Steps(std::mt19937& r, const std::vector<size_t>& counts, const Setting& setting)
      : random(r), how(setting) {
    size_t total = 0;
    for (size_t i = 0; i < counts.size(); ++i) {
      tensors.push_back(std::make_unique<Tensor>(random, counts[i], i % 2, how));
      total += counts[i];
    }
    for (size_t i = 0; i < (how.model ? 1 : counts.size()); ++i) {
      const size_t count = how.model ? total : counts[i];
      outputs.push_back(
          std::make_unique<Output>(std::min(count, count / 100 + 1), bytes_of(how.state)));
    }
    for (const Side& side : {here(), there()}) {
      const Tables tables(*this, side);
      rooms.push_back(
          std::make_unique<Room>(side, side.kernels.dgc_workspace_bytes(tables.view())));
    }
  }
  struct Output {
    Output(size_t count, size_t bytes)
        : k(count), indices(k), values(k * bytes), u_values(k * bytes) {}
    size_t k;
    Twin<int32_t> indices;
    Twin<std::byte> values, u_values;
  };
  struct Tables {
    Tables(const Steps& steps, const Side& side) : dtype(steps.how.state) {
      for (const auto& t : steps.tensors)
        pieces.push_back({t->grad.at(side), steps.how.decay ? t->weight.at(side) : nullptr,
                          t->u.at(side), t->v.at(side), t->count});
      size_t number = 0;
      for (const auto& o : steps.outputs)
        selections.push_back({steps.how.model ? pieces.size() : 1, o->k, 7 * number++,
                              o->indices.at(side), o->values.at(side), o->u_values.at(side)});
    }
    kernels::DgcTables view() const { return {pieces, selections, dtype}; }
    Dtype dtype;
    std::vector<kernels::DgcPiece> pieces;
    std::vector<kernels::DgcSelection> selections;
  };

  void run(float size, bool skipped) {
    new_gradients(size, skipped);
    enqueue(here());
    enqueue(there());
    compare();
  }

  // One step captured in a graph, which is then launched once for each size.
  void replay(const std::vector<float>& gradients) {
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t steps = nullptr;
    check_cuda(cudaStreamBeginCapture(stream(), cudaStreamCaptureModeGlobal));
    enqueue(there());
    check_cuda(cudaStreamEndCapture(stream(), &graph));
    check_cuda(cudaGraphInstantiate(&steps, graph, 0));
    int number = 0;
    for (const float size : gradients) {
      new_gradients(size, ++number == 3);
      enqueue(here());
      check_cuda(cudaGraphLaunch(steps, stream()));
      compare();
    }
    check_cuda(cudaGraphExecDestroy(steps));
    check_cuda(cudaGraphDestroy(graph));
  }

  void new_gradients(float size, bool skipped) {
    found_inf.write({skipped ? 1.f : 0.f});
    for (auto& t : tensors) {
      std::vector<float> grad = numbers(random, t->count, size);
      if (size > 3 && !grad.empty()) grad[grad.size() / 2] = INFINITY;
      t->grad.write(as_bytes(std::move(grad), how.grad));
    }
  }

  void enqueue(const Side& side) {
    const Tables tables(*this, side);
    side.kernels.dgc_step({.tables = tables.view(),
                           .grad_dtype = how.grad,
                           .weight_dtype = how.grad,
                           .momentum = 0.9,
                           .weight_decay = how.decay ? 0.01 : 0,
                           .scale = 0.5,
                           .scales = nullptr,
                           .nesterov = how.nesterov,
                           .masking = how.masking,
                           .found_inf = found_inf.at(side),
                           .workspace = rooms[side.on_device ? 1 : 0]->space()},
                          side.queue);
  }

  void compare() {
    for (size_t s = 0; s < outputs.size(); ++s) {
      const std::string which = "selection " + std::to_string(s) + ": ";
      outputs[s]->indices.compare(which + "indices");
      outputs[s]->values.compare(which + "values");
      outputs[s]->u_values.compare(which + "u_values");
    }
    for (size_t i = 0; i < tensors.size(); ++i) {
      tensors[i]->u.compare("u of tensor " + std::to_string(i));
      tensors[i]->v.compare("v of tensor " + std::to_string(i));
    }
  }

  std::mt19937& random;
  Setting how;
  std::vector<std::unique_ptr<Tensor>> tensors;
  std::vector<std::unique_ptr<Output>> outputs;
  std::vector<std::unique_ptr<Room>> rooms;  // of the CPU, and of the device
  Twin<float> found_inf{1};
};

}  // namespace

void run_topk(std::mt19937& random) {
  for (const size_t count : {1, 33, 4097, 9000}) {
    const auto x = numbers(random, count);
    for (const size_t k : {size_t{1}, count / 50, count / 2, count})
      if (k > 0) try_topk(x, k, count % 2);
  }
  for (const size_t count : sizes({45000}))  // through a sample
    for (const size_t share : {150, 1000}) try_topk(numbers(random, count), count / share, 0);
  try_topk(std::vector<float>(20000, 0.25f), 7, 1);  // only ties: more than the pool holds
}

#ifndef ON_GPU
void run_changed(std::mt19937& random) {
  const size_t count = 20000, k = count / 2;  // so many that `pack` reads all elements
  std::vector<float> x = numbers(random, count);
  const std::vector<float> before = x;
  unsigned grids = 0;
  emulator::options().before_grid = [&] {
    if (++grids == 4) std::fill(x.begin(), x.end(), 1000.f);  // `pack` finds that all are above
  };
  std::vector<int32_t> indices(count, -1);
  std::vector<float> values(count, -1.f);
  Device<std::byte> workspace(kernels().topk_workspace_bytes(count, k, Dtype::float32));
  kernels().topk({x.data(), count, Dtype::float32},
                 {.k = k,
                  .indices = indices.data(),
                  .values = values.data(),
                  .threshold = nullptr,
                  .workspace = {workspace.at(), workspace.size()}},
                 queue());
  finish();
  emulator::options().before_grid = {};
  check(grids == 4 && x != before, "the array changes before pack");
  const auto end = static_cast<ptrdiff_t>(k);
  check(std::all_of(indices.begin(), indices.begin() + end, [](int32_t i) { return i >= 0; }) &&
            std::all_of(values.begin(), values.begin() + end, [](float v) { return v == 1000; }),
        "topk of a changed array: k elements");
  check(std::all_of(indices.begin() + end, indices.end(), [](int32_t i) { return i == -1; }) &&
            std::all_of(values.begin() + end, values.end(), [](float v) { return v == -1; }),
        "topk of a changed array: nothing is written past them");
}
#endif

void run_brief(std::mt19937& random) {
  // More selections than blocks of a pass: a block turns from one to the next.
  Steps steps(random, {9000, 517, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39},
              {false, true, true, false});
  for (const float size : {0.1f, 0.1f, 5.f}) steps.run(size, false);
}

// The third launch is skipped; the tables of 300 tensors do not fit into one launch of `begin`.
void run_graph(std::mt19937& random) {
  Steps(random, {9000, 517}, {true, false, true, false}).replay({0.1f, 0.1f, 1.f, 5.f, 0.01f});
  Steps(random, std::vector<size_t>(300, 7), {false, true, true, false}).replay({0.1f, 1.f});
}

void run_infinity(std::mt19937& random) {
  Steps steps(random, {3000}, {false, false, false, false});
  for (const float size : {0.1f, 5.f, 0.1f}) steps.run(size, false);
}

void run_step(std::mt19937& random) {
  const std::vector<std::vector<size_t>> lists{{9000, 4096, 1, 517}, {0, 3, 8192}};
  int number = 0;
  for (const auto& list : lists)
    for (const Setting how : {Setting{false, false, true, false}, {true, true, false, true}}) {
      Steps steps(random, list, how);
      // Steady; none; a jump that the threshold does not expect; and down again, with a short
      // pool.
      for (const float size : {0.1f, 0.1f, 0.f, 5.f, 0.01f, 0.01f})
        steps.run(size, ++number % 4 == 3);
    }
  for (const size_t count : sizes({60000})) {
    Steps one(random, {count}, {false, false, true, false});
    for (const float size : {0.05f, 0.05f, 40.f, 0.05f}) one.run(size, false);
  }
}

void run_step_dtypes(std::mt19937& random) {
  for (const Dtype dtype : kFloats) {
    for (const size_t k : {1, 60, 3000}) try_topk(special_numbers(random, 3000), k, 1, dtype);
    for (const bool nesterov : {false, true}) {
      const Dtype state = dtype == Dtype::float64 ? dtype : Dtype::float32;
      Steps steps(random, {5000, 33}, {nesterov, true, !nesterov, nesterov, dtype, state});
      for (const float size : {0.1f, 0.1f, 5.f}) steps.run(size, false);
    }
  }
}

}  // namespace cases
