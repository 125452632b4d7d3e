// What the bindings share. They alone know nanobind: they turn integers into pointers, zs::Error into
// zerostall.errors, and keep alive what the jobs work on.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "capture.hpp"
#include "device.hpp"
#include "forks.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using nogil = nb::call_guard<nb::gil_scoped_release>;

namespace zs::python {

template <class T>
T* pointer(uint64_t address) {
  return reinterpret_cast<T*>(static_cast<uintptr_t>(address));
}

struct Plan {
  std::shared_ptr<const zs::Plan> plan;
};

// What Python holds of a device; jobs that are under way keep it, but get nothing more done.
struct Device {
  std::shared_ptr<zs::Device> device;
  uint32_t owner = forks();

  explicit Device(int ordinal) : device(zs::Device::open(ordinal)) {}
  Device(const Device&) = delete;
  ~Device() {
    if (forks() != owner) {  // a forked child has neither its thread nor a driver
      new std::shared_ptr<zs::Device>(std::move(device));
      return;
    }
    nb::gil_scoped_release release;
    device->close();
    device.reset();
  }
};

using Streams = std::vector<std::pair<nb::object, uint64_t>>;  // devices and their streams of now

inline std::vector<zs::Training> trainings_of(const Streams& streams, std::vector<nb::object>* keep) {
  std::vector<zs::Training> result;
  for (const auto& [device, stream] : streams) {
    result.push_back({nb::cast<const Device&>(device).device, pointer<CUstream_st>(stream)});
    if (keep != nullptr) keep->push_back(device);
  }
  return result;
}

// What Python holds of a job. Whoever lets go of it gives up the job: it is cancelled, and what is in flight
// is awaited, so that no thread touches the memory of tensors and images that may go next.
struct Job {
  std::shared_ptr<zs::Job> job;
  std::vector<nb::object> kept;
  uint32_t owner = forks();

  Job(std::shared_ptr<zs::Job> started, std::vector<nb::object> keep)
      : job(std::move(started)), kept(std::move(keep)) {}
  Job(const Job&) = delete;
  ~Job() {
    if (forks() != owner) {  // a forked child has no threads to wait for, nor their locks in a usable state
      new std::shared_ptr<zs::Job>(std::move(job));
      return;
    }
    nb::gil_scoped_release release;
    job->cancel();
    job->wait_for(std::nullopt);
    job.reset();
  }
  bool wait(std::optional<double> timeout) {
    using namespace std::chrono;
    const auto deadline = steady_clock::now() +
                          duration_cast<nanoseconds>(duration<double>(std::min(timeout.value_or(1e9), 1e9)));
    // In slices, so that Ctrl-C is noticed.
    while (true) {
      const auto slice = std::min<nanoseconds>(deadline - steady_clock::now(), milliseconds(100));
      {
        nb::gil_scoped_release release;
        if (job->wait_for(std::max(slice, nanoseconds(0)))) break;
      }
      if (PyErr_CheckSignals() != 0) throw nb::python_error();
      if (steady_clock::now() >= deadline) return false;
    }
    job->rethrow();
    return true;
  }
};

template <class T>
struct JobOf : Job {
  using Job::Job;
  T& get() const { return static_cast<T&>(*job); }
};

// Work of a few microseconds keeps the GIL: a thread that took it meanwhile would hold training up for
// longer.
inline constexpr size_t kBrief = 4096;

template <class Begin>
auto begun(Begin&& begin, bool brief) {
  std::optional<nb::gil_scoped_release> release;
  if (!brief) release.emplace();
  return begin();
}

template <class T, class Begin>
void make(JobOf<T>* self, std::vector<nb::object> keep, Begin&& begin, bool brief = false) {
  new (self) JobOf<T>(begun(begin, brief), std::move(keep));
}

template <class T, class Begin>
std::unique_ptr<JobOf<T>> made(std::vector<nb::object> keep, Begin&& begin, bool brief = false) {
  return std::make_unique<JobOf<T>>(begun(begin, brief), std::move(keep));
}

// One a file, in the order in which they build on one another.
void bind_memory(nb::module_& m);        // bindings.cpp
void bind_tensors(nb::module_& m);       // bindings_tensors.cpp
void bind_jobs(nb::module_& m);          // bindings_jobs.cpp
void bind_peer(nb::module_& m);          // bindings_peer.cpp
void bind_device_files(nb::module_& m);  // bindings_device_files.cpp
void bind_probes(nb::module_& m);        // bindings_probe.cpp

}  // namespace zs::python
