// Watches and blocks, kept and asked together.
#pragma once
#include <vector>

#include "bindings.hpp"
#include "block.hpp"
#include "error.hpp"
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
  }
  bool same() {
    if (dropped_) return false;
    for (const zs::Block* block : blocks_) block->fetch();
    for (const zs::Watch* watch : untouched_)
      if (!watch->untouched()) return false;
    for (zs::Watch* watch : watches_)
      if (!watch->same()) return false;
    for (const zs::Block* block : blocks_)
      if (!block->same()) return false;
    return true;
  }

 private:
  bool dropped_ = false;
  std::vector<nb::object> kept_;
  std::vector<const zs::Block*> blocks_;
  std::vector<zs::Watch*> watches_;
  std::vector<const zs::Watch*> untouched_;
};

}  // namespace zs::python
