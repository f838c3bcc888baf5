/* What another router tells of its own requests, counted: extproc/routing/told.py describes it and
 * has the same in Python. */
#define PY_SSIZE_T_CLEAN
#include "told.h"

#include "figures.h"
#include "numbers.h"
#include "objects.h"

enum { GAUGES, NUMBERS, WORDS };

static const char *const SPELLED[WORDS] = {"gauges", "numbers"};

static PyObject *words[WORDS];

/* The figures that were counted before, as extproc.routing.told.Counted has them. */
typedef struct {
    int64_t in_flight, booked_tokens, sent_tokens;
} Counted;

/* Reads figures from a message; -2 after an error, otherwise as figures_read. */
static ptrdiff_t read_told(PyObject *told, Figures *rows) {
    Py_buffer view;
    if (PyObject_GetBuffer(told, &view, PyBUF_SIMPLE)) return -2;
    ptrdiff_t count = figures_read(view.buf, (size_t)view.len, rows);
    PyBuffer_Release(&view);
    return count;
}

/* are_plain_figures(told) */
PyObject *module_are_plain_figures(PyObject *Py_UNUSED(module), PyObject *told) {
    Figures rows[MOST_FIGURES];
    ptrdiff_t count = read_told(told, rows);
    return count == -2 ? NULL : truth(count >= 0);
}

/* Counts by how much figures grew; the tokens sent begin anew if there are fewer than before. */
static bool count_growth(PyObject *numbers, const Counted *before, const Figures *after,
                         const SharingRules *rules) {
    long long in_flight, booked, sent;
    if (__builtin_sub_overflow(after->in_flight, before->in_flight, &in_flight) ||
        __builtin_sub_overflow(after->booked_tokens, before->booked_tokens, &booked) ||
        __builtin_sub_overflow(after->sent_tokens, before->sent_tokens, &sent)) {
        PyErr_SetString(PyExc_OverflowError, "too many requests or tokens");
        return false;
    }
    double queued = (double)(sent < 0 ? after->sent_tokens : sent);
    return numbers_share_told(numbers, in_flight, booked, queued, queued, rules);
}

/* Counts figures after others, which they replace; false after an error. */
static bool replace_counted(PyObject *last, PyObject *numbers, const Figures *told,
                            const SharingRules *rules) {
    Py_buffer view;
    if (PyObject_GetBuffer(last, &view, PyBUF_WRITABLE)) return false;
    Counted counted;
    bool is_sound = view.len == sizeof counted;
    if (is_sound) {
        memcpy(&counted, view.buf, sizeof counted);
        is_sound = count_growth(numbers, &counted, told, rules);
    } else {
        PyErr_SetString(PyExc_TypeError, "no counted figures");
    }
    if (is_sound) {
        counted = (Counted){told->in_flight, told->booked_tokens, told->sent_tokens};
        memcpy(view.buf, &counted, sizeof counted);
    }
    PyBuffer_Release(&view);
    return is_sound;
}

/* Counts a router's figures of a worker; *is_later: whether it told of that one before. False after
 * an error. */
static bool count_figures(PyObject *state, const Figures *told, PyObject *router,
                          const SharingRules *rules, bool *is_later) {
    PyObject *gauges = PyObject_GetAttr(state, words[GAUGES]);
    PyObject *last = gauges ? PyDict_GetItemWithError(gauges, router) : NULL;
    PyObject *numbers = last ? PyObject_GetAttr(state, words[NUMBERS]) : NULL;
    *is_later = last != NULL;
    bool is_counted = numbers && replace_counted(last, numbers, told, rules);
    Py_XDECREF(numbers);
    Py_XDECREF(gauges);
    return is_counted || (!last && !PyErr_Occurred());
}

/* Returns the record of the worker that is told of, with a reference; NULL if there is none, or after
 * an error. */
static PyObject *state_of(uint64_t id, PyObject *places, PyObject *endpoints) {
    PyObject *worker = PyLong_FromUnsignedLongLong(id);
    PyObject *place = worker ? PyDict_GetItemWithError(places, worker) : NULL;
    Py_XDECREF(worker);
    if (place && !PyTuple_Check(place)) PyErr_SetString(PyExc_TypeError, "no place");
    PyObject *endpoint = place && PyTuple_Check(place) ? PyTuple_GetItem(place, 0) : NULL;
    PyObject *state = endpoint ? PyDict_GetItemWithError(endpoints, endpoint) : NULL;
    Py_XINCREF(state);
    return state;
}

/* Appends a number to a list; false after an error. */
static bool append_number(PyObject *list, ptrdiff_t number) {
    PyObject *made = PyLong_FromSsize_t(number);
    bool is_added = made && !PyList_Append(list, made);
    Py_XDECREF(made);
    return is_added;
}

/* count_later(told, places, endpoints, router, (now, rate, window, most)) */
PyObject *module_count_later(PyObject *Py_UNUSED(module), PyObject *const *given, Py_ssize_t were) {
    double each[4];
    Figures rows[MOST_FIGURES];
    if (!are_given(given, were, "oddoo") || !numbers_of(given[4], each, 4)) return NULL;
    SharingRules rules = {each[0], each[1], each[2], each[3]};
    ptrdiff_t count = read_told(given[0], rows);
    if (count < 0) return count == -2 ? NULL : constant(Py_None);
    PyObject *first = PyList_New(0);
    for (ptrdiff_t n = 0; first && n < count; n++) {
        PyObject *state = state_of(rows[n].worker, given[1], given[2]);
        bool is_later = false;
        bool is_sound = state ? count_figures(state, &rows[n], given[3], &rules, &is_later)
                              : !PyErr_Occurred();
        Py_XDECREF(state);
        if (!is_sound || (!is_later && !append_number(first, n))) Py_CLEAR(first);
    }
    return first;
}

bool told_prepare(void) {
    for (int word = 0; word < WORDS; word++) {
        words[word] = PyUnicode_InternFromString(SPELLED[word]);
        if (!words[word]) return false;
    }
    return true;
}
