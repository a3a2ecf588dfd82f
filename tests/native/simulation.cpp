#include "simulation.h"

#include <sys/eventfd.h>

#include <algorithm>
#include <random>
#include <utility>

#include "harness.h"

namespace simulation {

using namespace pycomm;
using namespace pycomm::transport;

namespace {

// The world whose fibers run; a new fiber has no other way to find it.
World* current = nullptr;

}  // namespace

// One direction between two ranks.
class World::Wire {
 public:
  void send(ConstBytes head, ConstBytes body) {
    if (closed) return;
    std::vector<std::byte> bytes(head.begin(), head.end());
    bytes.insert(bytes.end(), body.begin(), body.end());
    underway.push_back(std::move(bytes));
  }
  void close() {
    if (!std::exchange(closed, true)) underway.emplace_back();  // nothing: the end
  }
  void deliver() {
    const auto& first = underway.front();
    if (first.empty()) over = true;
    here.insert(here.end(), first.begin(), first.end());
    underway.pop_front();
  }

  std::deque<std::vector<std::byte>> underway;
  std::vector<std::byte> here;  // arrived, and from `taken` on not taken
  size_t taken = 0;
  bool closed = false, over = false;  // at its two ends
};

// The end of `rank` of its connection to `peer`.
class End final : public Channel {
 public:
  End(World& world, int rank, int peer) : world_(world), rank_(rank), peer_(peer) {}
  ~End() override { End::close({}); }

  std::string_view transport() const override { return "simulated"; }
  size_t send(ConstBytes head, ConstBytes body) override {
    const size_t bytes = head.size() + body.size();
    if (closed_ || world_.at(rank_).dead) return bytes;
    world_.count_send(rank_);
    world_.wire(rank_, peer_).send(head, body);
    return bytes;
  }
  ConstBytes peek(size_t want) override {
    const auto here = ConstBytes(in().here).subspan(in().taken);
    return here.first(std::min(want, here.size()));
  }
  void take(size_t bytes) override { in().taken += bytes; }
  size_t receive(Bytes into) override {
    const ConstBytes here = peek(into.size());
    std::copy(here.begin(), here.end(), into.begin());
    take(here.size());
    return here.size();
  }
  bool is_closed() const override { return closed_; }
  pollfd arm(Want) override {
    world_.at(rank_).armed = true;
    return {world_.awake_.get(), POLLIN, 0};
  }
  // The first channel of a rank that prepares a sleep does so for all of them.
  void disarm(short revents) override {
    if (std::exchange(world_.at(rank_).armed, false) && revents != 0) world_.sleep(rank_);
    closed_ |= in().over;
  }
  void close(ConstBytes) override {  // its wires hold everything
    world_.wire(rank_, peer_).close();
    closed_ = true;
  }

 private:
  World::Wire& in() const { return world_.wire(peer_, rank_); }

  World& world_;
  int rank_, peer_;
  bool closed_ = false;
};

World::World(int size, Fate fate, Looks looks, Body body)
    : fate_(fate), looks_(looks), body_(std::move(body)), awake_(::eventfd(1, EFD_CLOEXEC)) {
  scheduler_.adopt();
  for (int i = 0; i < size * size; ++i) wires_.push_back(std::make_unique<Wire>());
  engine::EngineOptions options;
  for (int rank = 0; rank < size; ++rank) {
    options.names.push_back("rank " + std::to_string(rank));
    ranks_.push_back(std::make_unique<Rank>(live));
  }
  for (int rank = 0; rank < size; ++rank) {
    std::vector<std::unique_ptr<Channel>> channels(static_cast<size_t>(size));
    for (int peer = 0; peer < size; ++peer)
      if (peer != rank)
        channels[static_cast<size_t>(peer)] = std::make_unique<End>(*this, rank, peer);
    options.rank = rank;
    at(rank).engine = std::make_unique<engine::Engine>(std::move(channels), options);
    let_run(rank);
  }
}

World::~World() = default;

// The body of a fiber; it never returns.
void World::live() {
  World& world = *current;
  emulator::Fiber::arrived(world.scheduler_);
  world.turns_.acquire();
  const int rank = world.running_;
  try {
    world.body_(rank, *world.at(rank).engine);
    if (world.fate_.victim == rank) world.die(rank);
  } catch (const Died&) {  // as the scene demands
  }
  world.at(rank).engine->leave();
  world.at(rank).ended = true;
  world.sleep(rank);
}

World::Wire& World::wire(int from, int to) const {
  return *wires_[static_cast<size_t>(from) * ranks_.size() + static_cast<size_t>(to)];
}

void World::let_run(int rank) {
  at(rank).news = false;
  current = this;
  running_ = rank;
  turns_.release();
  at(rank).fiber.run(scheduler_);
  turns_.acquire();
}

void World::sleep(int rank) {
  turns_.release();
  scheduler_.run(at(rank).fiber);
  turns_.acquire();
}

void World::count_send(int rank) {
  if (rank == fate_.victim && at(rank).sends == fate_.sends) {
    die(rank);
    throw Died();
  }
  ++at(rank).sends;
}

void World::die(int rank) {
  at(rank).dead = true;
  for (int peer = 0; peer < static_cast<int>(ranks_.size()); ++peer) wire(rank, peer).close();
}

std::vector<Step> World::possible() const {
  std::vector<Step> steps;
  const int size = static_cast<int>(ranks_.size());
  for (int rank = 0; rank < size; ++rank) {
    if (at(rank).ended) continue;
    for (int from = 0; from < size; ++from)
      if (from != rank && !wire(from, rank).underway.empty()) steps.push_back({rank, from});
    if (at(rank).news) steps.push_back({rank, kLook});
  }
  return steps;
}

void World::take(const Step& step) {
  if (step.from == kLook) return let_run(step.at);
  wire(step.from, step.at).deliver();
  at(step.at).news = true;
  if (looks_ == Looks::at_once) let_run(step.at);
}

bool World::all_ended() const {
  return std::ranges::all_of(ranks_, [](const auto& rank) { return rank->ended; });
}

void World::give_up() {
  for (int rank = 0; rank < static_cast<int>(ranks_.size()); ++rank) {
    at(rank).engine->stop().request("the simulation is over");
    while (!at(rank).ended) let_run(rank);
  }
}

namespace {

std::string text_of(const std::vector<Step>& steps) {
  std::string text;
  for (const Step& step : steps)
    text += step.from == kLook
                ? " " + std::to_string(step.at) + " looks,"
                : " " + std::to_string(step.from) + " to " + std::to_string(step.at) + ",";
  return text;
}

// Checks a world in which no further step is possible.
void check_end(World& world, const std::vector<Step>& steps,
               const std::function<void(World&)>& check) {
  const bool all = world.all_ended();
  if (!all) world.give_up();
  try {
    expect(all, "a rank waits without end");
    check(world);
  } catch (const Failure& failure) {
    throw Failure(failure.what() + std::string("\n  in the order") + text_of(steps));
  }
}

// A point with several possible steps. `asleep` are those that lead to nothing new from here: they
// were taken before, and no step that they depend on has happened since.
struct Fork {
  Step taken{};
  std::vector<Step> open, asleep;
};

bool has(const std::vector<Step>& steps, const Step& step) {
  return std::ranges::find(steps, step) != steps.end();
}

// Runs a world along `path` and beyond its end, where it adds forks. False if it reached a state
// from which nothing new follows.
bool follow(World& world, std::vector<Fork>& path, std::vector<Step>& steps) {
  std::vector<Step> asleep;
  bool fresh = true;
  for (size_t i = 0;; ++i) {
    const std::vector<Step> possible = world.possible();
    if (possible.empty()) return fresh;
    if (fresh && i == path.size()) {
      Fork fork{{}, possible, asleep};
      std::erase_if(fork.open, [&](const Step& step) { return has(asleep, step); });
      fresh = !fork.open.empty();
      if (fresh) {
        fork.taken = fork.open.front();
        path.push_back(std::move(fork));
      }
    }
    const Step step = fresh ? path[i].taken : possible.front();  // else only to finish
    if (fresh) {
      asleep = path[i].asleep;
      std::erase_if(asleep, [&](const Step& other) { return depend(other, step); });
    }
    world.take(step);
    steps.push_back(step);
  }
}

}  // namespace

size_t every_order(const std::function<World&()>& make, const std::function<void(World&)>& check,
                   size_t most) {
  std::vector<Fork> path;
  size_t orders = 0;
  for (size_t runs = 0;; ++runs) {
    expect(runs < most, "there are more orders than " + std::to_string(most));
    std::vector<Step> steps;
    World& world = make();
    const bool fresh = follow(world, path, steps);
    check_end(world, steps, fresh ? check : [](World&) {});
    orders += fresh;
    for (; !path.empty(); path.pop_back()) {
      Fork& last = path.back();
      last.asleep.push_back(last.taken);
      std::erase(last.open, last.taken);
      if (last.open.empty()) continue;
      last.taken = last.open.front();
      break;
    }
    if (path.empty()) return orders;
  }
}

void one_order(World& world, uint64_t seed, const std::function<void(World&)>& check) {
  std::mt19937_64 random(seed);
  std::vector<Step> steps;
  for (auto possible = world.possible(); !possible.empty(); possible = world.possible()) {
    steps.push_back(possible[random() % possible.size()]);
    world.take(steps.back());
  }
  check_end(world, steps, check);
}

}  // namespace simulation
