// Calls of a group in which a rank dies, or makes another call, in every order of events: real
// engines over channels whose deliveries are decided one by one (simulation.h).
//
//   simulation           every order of a call of 3 ranks, some random ones of two calls of 5
//   simulation long      every order of two calls of 3 ranks (of one where a call has many orders),
//                        a million random ones of 5
//
// In every order: all ranks end; a rank that succeeds has the right numbers; one that fails names
// the dead rank or, without a death, the disagreement, and continues; no live rank counts as lost.
#include "simulation.h"

#include <algorithm>
#include <iostream>
#include <random>

#include "collectives/choose.h"
#include "core/operation.h"
#include "harness.h"
#include "kernels/kernels.h"

namespace {

using namespace pycomm;
using namespace pycomm::engine;
using namespace simulation;

constexpr size_t kMostOrders = 200'000;

struct Call {
  Operation operation = Operation::all_reduce;
  Algorithm algorithm = Algorithm::ring;
};

struct Scene {
  int size = 3;
  Call call{};
  Fate fate{};
  int stray = -1;  // makes another call first
  int calls = 1;

  std::string text() const {
    return std::string(name_of(call.operation)) + " " + std::string(name_of(call.algorithm)) +
           ", " + std::to_string(size) + " ranks" +
           (fate.victim < 0 ? ""
                            : ", rank " + std::to_string(fate.victim) + " dies at send " +
                                  std::to_string(fate.sends)) +
           (stray < 0 ? "" : ", rank " + std::to_string(stray) + " makes another call");
  }
};

// The outcome of one rank.
struct Outcome {
  std::vector<Error> errors;
  int right = 0, wrong = 0;  // calls that succeeded
  std::vector<int> lost;
};

float element(int rank, size_t i, int call) {
  return static_cast<float>(rank * 10 + call) + static_cast<float>(i);
}

// True if the numbers are right.
bool run_call(Engine& engine, const Scene& scene, int call, bool astray) {
  const size_t count = static_cast<size_t>(scene.size) + (astray ? 1 : 0);
  const Schedule schedule = make_schedule(
      collectives::make_plan(scene.call.algorithm, scene.call.operation,
                             {.rank = engine.rank(), .size = scene.size, .count = count}),
      engine.rank());
  std::vector<float> array(count), want(count);
  for (size_t i = 0; i < count; ++i) {
    array[i] = element(engine.rank(), i, call);
    want[i] = element(0, i, call);
    if (scene.call.operation == Operation::all_reduce)
      for (int rank = 1; rank < scene.size; ++rank) want[i] += element(rank, i, call);
  }
  Job job{.schedule = &schedule};
  transport::Header signature;
  signature.operation = static_cast<uint8_t>(scene.call.operation);
  signature.algorithm = static_cast<uint8_t>(scene.call.algorithm);
  signature.dtype = static_cast<uint8_t>(Dtype::float32);
  signature.count = count;
  job.header = engine.next_header(signature);
  job.output = reinterpret_cast<std::byte*>(array.data());
  job.input = job.output;
  job.element_bytes = sizeof(float);
  job.reducer = &kernels::reducer(Dtype::float32, ReduceOp::sum);
  job.size = scene.size;
  engine::PlanTask task = engine.plan_task(job);
  engine.run(task, job.header, Deadline(std::chrono::hours(1)));
  return scene.call.operation == Operation::barrier || array == want;
}

// A rank's part: its calls, until one breaks the group.
void play(Engine& engine, const Scene& scene, Outcome& outcome) {
  const bool stray = engine.rank() == scene.stray;
  for (int call = 0; call < scene.calls; ++call) {
    try {
      ++(run_call(engine, scene, call, stray && call == 0) ? outcome.right : outcome.wrong);
    } catch (const Error& error) {
      outcome.errors.push_back(error);
      if (error.kind() != ErrorKind::mismatch) break;
    }
  }
  outcome.lost = engine.status().lost;
}

struct Play {
  Play(const Scene& of, Looks looks)
      : scene(of),
        outcomes(static_cast<size_t>(of.size)),
        world(of.size, of.fate, looks, [this](int rank, Engine& engine) {
          play(engine, scene, outcomes[static_cast<size_t>(rank)]);
        }) {}
  Scene scene;
  std::vector<Outcome> outcomes;
  World world;
};

void check_survivor(const Scene& scene, const Outcome& outcome) {
  const int victim = scene.fate.victim;
  expect_equal(outcome.wrong, 0, "calls with wrong numbers");
  if (outcome.errors.empty()) return expect_equal(outcome.right, scene.calls, "calls");
  const Error& error = outcome.errors.back();
  expect(victim >= 0, std::string("it failed although no rank died:  ") + error.what());
  expect(error.kind() == ErrorKind::peer_lost && error.fields().peer == victim,
         std::string("it does not name the dead: ") + error.what());
  expect(std::ranges::count(outcome.lost, victim) == 1, "the dead rank does not count as lost");
}

// A call on which ranks disagree: all report it, and the next one works.
void check_disagreement(const Outcome& outcome) {
  expect(outcome.errors.size() == 1 && outcome.errors[0].kind() == ErrorKind::mismatch,
         outcome.errors.empty() ? "it does not report the disagreement"
                                : outcome.errors.back().what());
  expect(outcome.right == 1 && outcome.wrong == 0, "the group does not continue");
}

void check_play(const Play& play) {
  for (int rank = 0; rank < play.scene.size; ++rank) {
    const Outcome& outcome = play.outcomes[static_cast<size_t>(rank)];
    const auto blame = [&](const Failure& failure) {
      return Failure(play.scene.text() + ", rank " + std::to_string(rank) + ": " + failure.what());
    };
    try {
      if (rank == play.scene.fate.victim) continue;
      if (play.scene.stray >= 0)
        check_disagreement(outcome);
      else
        check_survivor(play.scene, outcome);
    } catch (const Failure& failure) {
      throw blame(failure);
    }
  }
}

size_t try_every_order(const Scene& scene) {
  std::unique_ptr<Play> now;
  return every_order(
      [&]() -> World& {
        now.reset();
        now = std::make_unique<Play>(scene, Looks::at_once);
        return now->world;
      },
      [&](World&) { check_play(*now); }, kMostOrders);
}

// How often each rank sends without a death.
std::vector<size_t> sends_of(const Scene& scene) {
  Play play(scene, Looks::at_once);
  one_order(play.world, 1, [&](World&) { check_play(play); });
  std::vector<size_t> sends;
  for (int rank = 0; rank < scene.size; ++rank) sends.push_back(play.world.sends(rank));
  return sends;
}

std::vector<Call> calls() {
  std::vector<Call> all;
  for (const Operation operation :
       {Operation::all_reduce, Operation::broadcast, Operation::barrier})
    for (const Algorithm algorithm : collectives::algorithms_for(operation))
      if (algorithm != Algorithm::hierarchical) all.push_back({operation, algorithm});
  return all;
}

// Without a death, and with one at each send of the rank and after the last one.
size_t try_every_death(Scene scene) {
  size_t orders = try_every_order(scene);
  const auto sends = sends_of(scene);
  for (int victim = 0; victim < scene.size; ++victim)
    for (size_t at = 0; at <= sends[static_cast<size_t>(victim)]; ++at) {
      scene.fate = {victim, at};
      orders += try_every_order(scene);
    }
  return orders;
}

// Calls of three ranks with some 10,000 orders for each death.
bool has_many_orders(const Call& call) {
  return call.operation == Operation::all_reduce &&
         (call.algorithm == Algorithm::direct_two_phase || call.algorithm == Algorithm::halving);
}

const Test kDeaths("every death of one rank of three, in every order", [] {
  for (const Call& call : calls())
    if (!has_many_orders(call))
      expect(try_every_death({.call = call}) > 1, "there is but one order");
});

const Test kStrays("every disagreement of three, in every order", [] {
  for (const Algorithm algorithm : collectives::algorithms_for(Operation::all_reduce))
    for (int stray = 0; stray < 3; ++stray)
      if (algorithm == Algorithm::ring || algorithm == Algorithm::tree)
        try_every_order({.call = {Operation::all_reduce, algorithm}, .stray = stray, .calls = 2});
});

// Messages between devices: an act is a send, a receive or, before them, a broadcast.
enum class Verb { broadcast, offer, receive };
struct Act {
  Verb verb = Verb::broadcast;
  int peer = 0;
  size_t count = 3;
  bool again = false;  // repeat while a disagreement about another call ends it
};

// Whether the act succeeds.
bool act_once(Engine& engine, const Act& act) {
  if (act.verb == Verb::broadcast)
    return run_call(engine, {.call = {Operation::broadcast, Algorithm::direct}}, 0, act.count != 3);
  const Deadline deadline(std::chrono::hours(1));
  transport::Header signature{.operation = static_cast<uint8_t>(Operation::send),
                              .dtype = static_cast<uint8_t>(Dtype::float32),
                              .algorithm = transport::kOnDevice,
                              .count = act.count};
  if (act.verb == Verb::offer)
    engine.messenger().announce_send(act.peer, signature, deadline);
  else
    (void)engine.messenger().receive(act.peer, signature, {}, deadline);
  return true;
}

using Well = std::vector<std::vector<bool>>;  // by rank and act

// The acts of each rank, in order.
struct Messages {
  explicit Messages(const std::vector<std::vector<Act>>& acts)
      : well(acts.size()),
        world(static_cast<int>(acts.size()), {}, Looks::at_once,
              [this, acts](int rank, Engine& engine) {
                for (const Act& act : acts[static_cast<size_t>(rank)])
                  well[static_cast<size_t>(rank)].push_back(go(engine, act));
              }) {}

  static bool go(Engine& engine, const Act& act) {
    for (;;) try {
        return act_once(engine, act);
      } catch (const Error& error) {
        const bool of_message = std::string(error.what()).find("receives") != std::string::npos;
        if (error.kind() != ErrorKind::mismatch || of_message || !act.again) return false;
      }
  }

  Well well;
  World world;
};

// For every order, calls `check` with the successes; returns the number of orders.
size_t try_messages(const std::vector<std::vector<Act>>& acts,
                    const std::function<void(const Well&)>& check) {
  std::unique_ptr<Messages> now;
  return every_order(
      [&]() -> World& {
        now.reset();
        now = std::make_unique<Messages>(acts);
        return now->world;
      },
      [&](World&) { check(now->well); }, kMostOrders);
}

constexpr Act kGive{Verb::offer, 1}, kReply{Verb::offer, 0};
constexpr Act kTake{Verb::receive, 0}, kBack{Verb::receive, 1};

const Test kOffers("messages between devices of three, in every order", [] {
  constexpr Act kOther{Verb::receive, 0, 4}, kAnyone{Verb::receive, kAnyPeer};
  const auto wanted = [](bool first) {
    return [first](const Well& well) {
      for (const auto& of_rank : well)
        for (size_t i = 0; i < of_rank.size(); ++i)
          expect_equal<bool>(of_rank[i], first || i > 0, "act " + std::to_string(i));
    };
  };
  expect(try_messages({{kGive, kBack}, {kTake, kReply}, {}}, wanted(true)) > 0, "no order");
  expect(try_messages({{kAnyone, kAnyone}, {kReply}, {kReply}}, wanted(true)) > 1, "orders");
  // The peer receives another kind, or sends too; the next message succeeds.
  try_messages({{kGive, kGive}, {kOther, kTake}, {}}, wanted(false));
  try_messages({{kGive, kGive}, {kReply, kTake}, {}}, wanted(false));
});

// The root finishes before rank 2 learns that its call was another, and the others learn it at any
// time. A rank that took an abandoned message would make its peer wait without end.
const Test kOffersAstray(
    "messages between devices while one makes another call, of three, in every order", [] {
      for (const auto& [giver, taker] : {std::pair(0, 1), {1, 0}, {1, 2}, {2, 1}}) {
        std::vector<std::vector<Act>> acts(3);
        for (int rank = 0; rank < 3; ++rank)
          acts[static_cast<size_t>(rank)].push_back({.count = rank == 2 ? size_t{4} : size_t{3}});
        for (const size_t count : {size_t{5}, size_t{6}}) {
          acts[static_cast<size_t>(giver)].push_back({Verb::offer, taker, count, true});
          acts[static_cast<size_t>(taker)].push_back({Verb::receive, giver, count, true});
        }
        const auto fine = [&, giver = giver, taker = taker](const Well& well) {
          for (const int rank : {giver, taker}) {
            const auto& mine = well[static_cast<size_t>(rank)];
            expect(mine[1] && mine[2], "rank " + std::to_string(rank) + " took another message");
          }
        };
        expect(try_messages(acts, fine) > 1, "there is but one order");
      }
    });

const Test kMore("long: every death of one rank of three in two calls, in every order", [] {
  for (const Call& call : calls()) {
    const Scene scene{.call = call, .calls = has_many_orders(call) ? 1 : 2};
    const size_t orders = try_every_death(scene);
    std::cout << scene.text() << ", calls: " << scene.calls << ": " << orders << " orders"
              << std::endl;
  }
});

// One of five dies; the seed decides when, and in which order.
void try_one(uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto all = calls();
  Scene scene{.size = 5, .call = all[random() % all.size()], .calls = 2};
  scene.fate = {static_cast<int>(random() % 5), random() % 20};
  Play play(scene, Looks::later);
  try {
    one_order(play.world, seed, [&](World&) { check_play(play); });
  } catch (const Failure& failure) {
    throw Failure("seed " + std::to_string(seed) + ": " + failure.what());
  }
}

const Test kSome("random deaths of one rank of five", [] {
  for (uint64_t seed = 0; seed < 500; ++seed) try_one(seed);
});

const Test kMillion("long: a million random deaths of one rank of five", [] {
  for (uint64_t seed = 0; seed < 1'000'000; ++seed) {
    try_one(seed);
    if (seed % 10'000 == 0) std::cout << '\r' << seed / 10'000 << " % of a million" << std::flush;
  }
  std::cout << '\n';
});

}  // namespace
