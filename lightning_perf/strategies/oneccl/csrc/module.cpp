// What Python sees of it: how a process group is made, and the end of all of them.

#include <stdlib.h>

#include <algorithm>
#include <iostream>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <torch/csrc/utils/pybind.h>

#include "backend.h"
#include "engine.h"

namespace lightning_perf {

// The stores by which the processes of a group find each other, where this process made them.
std::map<std::string, std::shared_ptr<ccl::kvs>>& stores() {
  static auto* made = new std::map<std::string, std::shared_ptr<ccl::kvs>>();
  return *made;
}

// On standard output oneCCL says that the level of its log was set, at a level above it.
void start_oneccl() {
  static const bool started = [] {
    const char* level = getenv("CCL_LOG_LEVEL");
    const bool quiet = level && std::string(level) == "error";
    auto* const output = std::cout.rdbuf();
    if (quiet) std::cout.rdbuf(nullptr);
    ccl::init();
    if (quiet) std::cout.rdbuf(output);
    return true;
  }();
  (void)started;
}

constexpr milliseconds kOpen{60000};

pybind11::bytes open_store() {
  auto address = std::make_shared<std::string>();
  {
    pybind11::gil_scoped_release released;
    Engine::get().call(
        [address] {
          start_oneccl();
          const auto store = ccl::create_main_kvs();
          const auto bytes = store->get_address();
          address->assign(bytes.begin(), bytes.end());
          stores()[*address] = store;
        },
        "opening a port", kOpen, {});
  }
  return *address;
}

// Address, rank and size of the communicators that can serve again.
std::vector<std::tuple<pybind11::bytes, int, int>> idle() {
  std::vector<GroupPtr> groups;
  {
    pybind11::gil_scoped_release released;
    groups = Engine::get().idle();
  }
  std::vector<std::tuple<pybind11::bytes, int, int>> found;
  for (const auto& group : groups) {
    found.emplace_back(group->address, group->rank, group->size);
  }
  return found;
}

c10::intrusive_ptr<c10d::Backend> create(const std::string& address, int rank, int size,
                                         const std::string& name, int64_t timeout_ms,
                                         const std::vector<std::tuple<int, int, int, std::string>>&
                                             peers) {
  auto group = std::make_shared<Group>();
  group->rank = rank;
  group->size = size;
  group->name = name;
  group->timeout_ms = timeout_ms;
  for (const auto& [in_group, in_run, pid, started] : peers) {
    group->peers.push_back({in_group, in_run, pid, started});
  }
  group->address = address;
  for (const auto& idle : Engine::get().idle()) {
    if (idle->address != address) continue;
    group->communicator = std::move(idle->communicator);
    idle->communicator.reset();
    Engine::get().add(group);
    return c10::make_intrusive<CclBackend>(group);
  }
  Engine::get().call(
      [group, address] {
        start_oneccl();
        auto found = stores().find(address);
        if (found == stores().end()) {
          ccl::kvs::address_type bytes;
          std::copy(address.begin(), address.end(), bytes.begin());
          found = stores().emplace(address, ccl::create_kvs(bytes)).first;
        }
        group->communicator = ccl::create_communicator(group->size, group->rank, found->second);
      },
      "creating " + name, milliseconds(timeout_ms), group->peers);
  Engine::get().add(group);
  return c10::make_intrusive<CclBackend>(group);
}

}  // namespace lightning_perf

PYBIND11_MODULE(lightning_perf_oneccl, module) {
  namespace py = pybind11;
  using namespace lightning_perf;
  using Release = py::call_guard<py::gil_scoped_release>;
  module.def("open_store", &open_store);
  module.def("idle", &idle);
  module.def("create", &create, Release());
  module.def(
      "close_all", [](int64_t limit_ms) { Engine::get().close_all(milliseconds(limit_ms)); },
      Release());
}
