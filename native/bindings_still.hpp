// Watches and blocks, kept and asked together.
#pragma once
#include <algorithm>
#include <vector>

#include "bindings.hpp"
#include "block.hpp"
#include "error.hpp"
#include "prefetch.hpp"
#include "watch.hpp"

namespace zs::python {

class Still {
 public:
  Still(nb::iterable items, nb::iterable untouched) {
    for (nb::handle item : items) {
      kept_.push_back(nb::borrow(item));
      if (nb::isinstance<zs::Block>(item))
        blocks_.push_back(nb::inst_ptr<zs::Block>(item));
      else if (nb::isinstance<zs::Watch>(item))
        watches_.push_back(nb::inst_ptr<zs::Watch>(item));
      else
        throw zs::Error(zs::Kind::usage, "only blocks and watches tell whether they are still the same");
    }
    for (nb::handle item : untouched) {
      kept_.push_back(nb::borrow(item));
      untouched_.push_back(&nb::cast<zs::Watch&>(item));
    }
  }
  int traverse(visitproc visit, void* arg) const {
    for (const nb::object& one : kept_) Py_VISIT(one.ptr());
    return 0;
  }
  // Is never the same after this.
  void drop() noexcept {
    dropped_ = true;
    const std::vector<nb::object> kept = std::move(kept_);  // letting go may run any code
    kept_.clear();
    blocks_.clear();
    watches_.clear();
    untouched_.clear();
    tags_.clear();
  }
  bool same() {
    if (dropped_) return false;
    for (const zs::Block* block : blocks_) block->fetch();
    if (!no_tag_changed() && !watches_same()) return false;
    for (const zs::Block* block : blocks_)
      if (!block->same()) return false;
    return true;
  }

 private:
  // All tags of all watches side by side: to go from one watch to its containers, one after the other, waits
  // for memory at each step.
  bool no_tag_changed() const {
    constexpr size_t kAhead = 48;
    if (tags_.empty()) return false;
    for (size_t k = 0; k < std::min(kAhead, tags_.size()); ++k) prefetch(tags_[k].at);
    for (const zs::Watch* watch : untouched_)
      if (watch->dropped()) return false;
    for (const zs::Watch* watch : watches_)
      if (watch->dropped()) return false;
    for (size_t k = 0; k < tags_.size(); ++k) {
      if (k + kAhead < tags_.size()) prefetch(tags_[k + kAhead].at);
      if (*tags_[k].at != tags_[k].then) return false;
    }
    return std::all_of(watches_.begin(), watches_.end(),
                       [](const zs::Watch* watch) { return watch->others_same(); });
  }
  bool watches_same() {
    tags_.clear();
    for (const zs::Watch* watch : untouched_)
      if (!watch->untouched()) return false;
    for (zs::Watch* watch : watches_)
      if (!watch->same()) return false;
    bool told = true;
    for (const zs::Watch* watch : untouched_) told = told && watch->add_tags(tags_, true);
    for (const zs::Watch* watch : watches_) told = told && watch->add_tags(tags_, false);
    if (!told) tags_.clear();
    return true;
  }

  bool dropped_ = false;
  std::vector<nb::object> kept_;
  std::vector<const zs::Block*> blocks_;
  std::vector<zs::Watch*> watches_;
  std::vector<const zs::Watch*> untouched_;
  std::vector<zs::Watch::Tag> tags_;  // as they were when all was the same; none where tags do not tell
};

}  // namespace zs::python
