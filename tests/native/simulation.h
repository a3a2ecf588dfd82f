// A group of real engines in one deterministic world: a scheduler decides, one step at a time,
// which data arrives and which rank checks next. So every order of events can be tried, and a seed
// reproduces a run.
//
// Real: engines, links, plans, schedules, failure handling. Simulated: channels, which hold data
// until the scheduler delivers it, and time, which does not pass: no call reaches its limit and no
// rank sends heartbeats. A rank is a fiber, which runs from one sleep of its engine to the next.
// One send arrives as a whole; link_test.cpp and death_test.cpp test partial frames.
#pragma once

#include <functional>
#include <memory>
#include <stdexcept>
#include <vector>

#include "emulator/fiber.hpp"
#include "engine/engine.h"

namespace simulation {

// The death of a rank: at its send number `sends`, counted from 0, or after its calls.
struct Fate {
  int victim = -1;  // none
  size_t sends = 0;
};

struct Died : std::runtime_error {
  Died() : std::runtime_error("died") {}
};

// A step of the scheduler: deliver the oldest data in transit from `from` to `at`; or, where from
// is kLook, let `at` check what has arrived.
inline constexpr int kLook = -1;
struct Step {
  int at = 0, from = kLook;
  bool operator==(const Step&) const = default;
};

// Whether a rank checks each delivery before the next one, or some time later.
enum class Looks { at_once, later };

// Steps at different ranks are independent: a delivery changes only its receiver, and a check only
// appends to the data that its rank has sent.
inline bool depend(const Step& a, const Step& b) { return a.at == b.at; }

class World {
 public:
  // `body` runs on each rank with its engine; it may throw only Died.
  using Body = std::function<void(int rank, pycomm::engine::Engine& engine)>;
  World(int size, Fate fate, Looks looks, Body body);
  ~World();
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  // The possible steps; empty: all ranks have ended, or wait without end.
  std::vector<Step> possible() const;
  void take(const Step& step);
  bool ended(int rank) const { return at(rank).ended; }
  bool all_ended() const;
  size_t sends(int rank) const { return at(rank).sends; }
  // Ends the ranks that wait without end, with an error of their engine.
  void give_up();

 private:
  class Wire;
  friend class End;
  struct Rank {
    explicit Rank(void (*entry)()) : fiber(entry) {}
    emulator::Fiber fiber;
    std::unique_ptr<pycomm::engine::Engine> engine{};
    bool ended = false, dead = false, armed = false, news = false;
    size_t sends = 0;
  };

  Wire& wire(int from, int to) const;
  Rank& at(int rank) const { return *ranks_[static_cast<size_t>(rank)]; }
  static void live();
  void let_run(int rank);
  void sleep(int rank);
  void count_send(int rank);
  void die(int rank);

  Fate fate_;
  Looks looks_;
  Body body_;
  pycomm::os::Fd awake_;  // always readable: no rank sleeps in the kernel
  emulator::Fiber scheduler_;
  emulator::Token turns_;  // of fibers: one after another
  int running_ = -1;       // rank
  std::vector<std::unique_ptr<Wire>> wires_;
  std::vector<std::unique_ptr<Rank>> ranks_;
};

// Runs a world to its end for every order of dependent steps, each once, and returns their number;
// `make` starts one, in place of the last, `check` checks it when no step is possible. Throws
// Failure with the steps if a check fails, and if there are more than `most` orders.
size_t every_order(const std::function<World&()>& make, const std::function<void(World&)>& check,
                   size_t most);

// The same for one random order.
void one_order(World& world, uint64_t seed, const std::function<void(World&)>& check);

}  // namespace simulation
