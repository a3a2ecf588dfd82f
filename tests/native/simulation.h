// A group of real engines in one deterministic world: a scheduler decides, one step at a time, what
// arrives where and who looks next. So every order in which things may happen can be tried, and a
// seed gives the same run again.
//
// What is real: engines, links, plans, schedules, failure. What is made up: channels, which hold
// what was sent until the scheduler delivers it, and time, which does not pass: no call waits for
// its limit and nobody pulses. A rank is a fiber, which runs from one sleep of its engine to the
// next. What is sent at once arrives at once; frames that are cut are link_test.cpp's and
// death_test.cpp's.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "emulator/fiber.hpp"
#include "engine/engine.h"

namespace simulation {

// Of a rank that dies: at its send number `sends`, counted from 0, or when it has ended its calls.
struct Fate {
  int victim = -1;  // nobody
  size_t sends = 0;
};

struct Died : std::runtime_error {
  Died() : std::runtime_error("died") {}
};

// What the scheduler may do next: let what `from` sent first of all that is on its way arrive at
// `at`; or, where from is kLook, let `at` look at what has arrived.
inline constexpr int kLook = -1;
struct Step {
  int at = 0, from = kLook;
  bool operator==(const Step&) const = default;
};

// Whether a rank looks at each thing that arrives before the next one does, or some time later.
enum class Looks { at_once, later };

// Steps at different ranks may change places: what arrives here changes nothing there, and who
// looks only adds behind what it has sent.
inline bool depend(const Step& a, const Step& b) { return a.at == b.at; }

class World {
 public:
  // `body` is what each rank does with its engine; it must not throw but Died.
  using Body = std::function<void(int rank, pycomm::Engine& engine)>;
  World(int size, Fate fate, Looks looks, Body body);
  ~World();
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  // What may happen now; nothing: all have ended, or wait for ever.
  std::vector<Step> possible() const;
  void take(const Step& step);
  bool ended(int rank) const { return at(rank).ended; }
  bool all_ended() const;
  size_t sends(int rank) const { return at(rank).sends; }
  // Ends those who wait for ever, with an error of their engine.
  void give_up();

 private:
  class Wire;
  friend class End;
  struct Rank {
    explicit Rank(void (*entry)()) : fiber(entry) {}
    emulator::Fiber fiber;
    std::unique_ptr<pycomm::Engine> engine{};
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
  pycomm::Fd awake_;  // always readable: nobody sleeps in the kernel
  emulator::Fiber scheduler_;
  emulator::Token turns_;  // of fibers: one after another
  int running_ = -1;       // rank
  std::vector<std::unique_ptr<Wire>> wires_;
  std::vector<std::unique_ptr<Rank>> ranks_;
};

// Runs a world to its end for every order of dependent steps, each once, and gives how many there
// were; `make` starts one, in place of the last, `check` looks at it when nothing more is possible.
// Throws Failure with the steps where it does not hold, and where there are more than `most`
// orders.
size_t every_order(const std::function<World&()>& make, const std::function<void(World&)>& check,
                   size_t most);

// The same for one order, by chance.
void one_order(World& world, uint64_t seed, const std::function<void(World&)>& check);

}  // namespace simulation
