// Subgroups: split() of a working group, and regroup() of the survivors of a broken one.
#include <algorithm>
#include <array>
#include <cstddef>
#include <optional>
#include <utility>

#include "core/sha256.h"
#include "group/connect.h"
#include "group/host_group.h"
#include "group/parent_store.h"

namespace pycomm::group {

std::string subgroup_secret(const std::string& secret, const std::string& name) {
  const Digest digest = hmac_sha256(secret, "pycomm group key\n" + name);
  return {digest.begin(), digest.end()};
}

namespace {

// The ranks of `members` in the world group.
std::vector<int> world_ranks(const GroupInfo& info, const std::vector<int>& members) {
  std::vector<int> ranks;
  for (const int member : members) ranks.push_back(info.ranks.at(static_cast<size_t>(member)));
  return ranks;
}

// Exchanges messages of the group's own with `peer`.
void swap_with(Group& group, int peer, std::span<const std::byte> mine,
               std::span<std::byte> theirs) {
  const Call out{.operation = Operation::send,
                 .input = mine.data(),
                 .count = mine.size(),
                 .peer = peer,
                 .tag = kInternalTag};
  const Call in{.operation = Operation::recv,
                .output = theirs.data(),
                .count = theirs.size(),
                .peer = peer,
                .tag = kInternalTag};
  group.exchange(std::array{out, in});
}

// The options of a group of `members` of the group with these options.
ConnectOptions subgroup_options(ConnectOptions child, std::chrono::nanoseconds timeout,
                                const std::vector<int>& members, const std::string& name) {
  child.wrap.inject_faults = nullptr;  // faults count the bytes of one group
  child.timeout = timeout;
  child.name = name;
  child.size = static_cast<int>(members.size());
  child.rank = static_cast<int>(std::ranges::find(members, child.rank) - members.begin());
  child.secret = subgroup_secret(child.secret, name);
  return child;
}

// The texts of all ranks, by rank. Gathers the lengths first, then the texts, padded to the
// longest.
std::vector<std::string> gather_texts(Group& group, const std::string& mine) {
  const auto size = static_cast<size_t>(group.size());
  std::vector<int64_t> lengths(size);
  const auto length = static_cast<int64_t>(mine.size());
  group.run({.operation = Operation::all_gather,
             .dtype = Dtype::int64,
             .input = &length,
             .output = lengths.data(),
             .count = 1});
  const auto longest = static_cast<size_t>(*std::ranges::max_element(lengths));
  std::string padded = mine, all(size * longest, '\0');
  padded.resize(longest);
  group.run({.operation = Operation::all_gather,
             .input = padded.data(),
             .output = all.data(),
             .count = longest});
  std::vector<std::string> texts;
  for (size_t i = 0; i < size; ++i)
    texts.push_back(all.substr(i * longest, static_cast<size_t>(lengths[i])));
  return texts;
}

}  // namespace

std::shared_ptr<Group> HostGroup::split(int color, int key) {
  struct ColorAndKey {
    int32_t color, key;
  };
  const ColorAndKey mine{color, key};
  std::vector<ColorAndKey> all(static_cast<size_t>(info_.size));
  run({.operation = Operation::all_gather,
       .dtype = Dtype::int32,
       .input = &mine,
       .output = all.data(),
       .count = 2});
  std::vector<int> members;
  for (int i = 0; i < info_.size; ++i)
    if (color >= 0 && all[static_cast<size_t>(i)].color == color) members.push_back(i);
  std::ranges::stable_sort(members, {}, [&](int i) { return all[static_cast<size_t>(i)].key; });

  const std::string name = info_.name + "/" + std::to_string(splits_++);
  if (color < 0) {  // the others exchange their rank infos through this rank
    (void)gather_texts(*this, {});
    return nullptr;
  }
  const ConnectOptions child =
      subgroup_options(options_, timeout_, members, name + "." + std::to_string(color));
  const bootstrap::Exchange exchange = [&](const std::string& mine) {
    const auto texts = gather_texts(*this, mine);
    std::vector<std::string> ours;
    for (const int member : members) ours.push_back(texts[static_cast<size_t>(member)]);
    return ours;
  };
  return make_group(child, exchange, world_ranks(info_, members),
                    [&](auto limit) { engine_.check_for_failures(limit, members); });
}

std::shared_ptr<Group> HostGroup::pair_with(int peer) {
  const std::vector<int> members{std::min(info_.rank, peer), std::max(info_.rank, peer)};
  const std::string name =
      info_.name + "/pair." + std::to_string(members[0]) + "." + std::to_string(members[1]);
  const bootstrap::Exchange exchange = [&](const std::string& mine) {
    const size_t bytes = mine.size();
    size_t length = 0;
    swap_with(*this, peer, std::as_bytes(std::span(&bytes, 1)),
              std::as_writable_bytes(std::span(&length, 1)));
    std::string theirs(length, '\0');
    swap_with(*this, peer, std::as_bytes(std::span(mine)),
              std::as_writable_bytes(std::span(theirs)));
    return info_.rank < peer ? std::vector{mine, theirs} : std::vector{theirs, mine};
  };
  return make_group(subgroup_options(options_, timeout_, members, name), exchange,
                    world_ranks(info_, members),
                    [&](auto limit) { engine_.check_for_failures(limit, members); });
}

std::shared_ptr<Group> HostGroup::regroup(rendezvous::Store& store, const std::string& name,
                                          int rank, std::vector<int> ranks,
                                          std::chrono::nanoseconds timeout) {
  ConnectOptions child = subgroup_options(options_, timeout_, {}, name);
  child.rank = rank;
  child.size = static_cast<int>(ranks.size());
  child.secret = options_.secret;  // the same on all survivors, whatever subgroups they formed
  const auto calls = std::exchange(child.timeout, timeout);
  auto group = connect(store, std::move(child), std::move(ranks));
  group->set_timeout(calls);
  return group;
}

// This group's id in the keys separates them from those of other groups in the store, and the
// number from those of earlier parts. A failed attempt removes its keys, and does not count.
std::shared_ptr<Group> HostGroup::connect_part(rendezvous::Store& store, ConnectOptions options) {
  const std::string name = options.name;
  {
    const std::lock_guard lock(mutex_);
    if (const int made = parts_[name]; made > 0) options.name += "#" + std::to_string(made + 1);
  }
  options.secret = subgroup_secret(options_.secret, options.name);
  options.open_key = options_.open_key;
  options.tuned = options_.tuned;
  for (const int rank : options.parent_ranks)
    options.known.push_back(info_.members.at(static_cast<size_t>(rank)));
  const std::string keys = std::to_string(id_) + "/" + options.name;
  shared::SharedMemoryRegion* const region = runner_.region();
  std::optional<ParentStore> shared;
  if (region != nullptr && region->size() == info_.size) shared.emplace(store, *region);
  auto part = connect(shared ? *shared : store, std::move(options), {}, keys);
  const std::lock_guard lock(mutex_);
  ++parts_[name];
  return part;
}

}  // namespace pycomm::group
