/* The numbers of an endpoint's load, and the arithmetic of its queue: extproc/_core.pyi describes
 * them. */
#define PY_SSIZE_T_CLEAN
#include "numbers.h"
#include "objects.h"

#include <math.h>
#include <structmember.h>

typedef struct {
    PyObject_HEAD
    double slowness, pace;
    char is_even;
} CorePace;

typedef struct {
    PyObject_HEAD
    PyObject *pace; /* a CorePace */
    long long in_flight, shared, shared_tokens;
    double backlog_tokens, backlog_at, lately_tokens, booked_tokens, sent_tokens, ahead_tokens,
        others, excess_tokens, asked_at;
} CoreNumbers;

static PyTypeObject *pace_type, *numbers_type;

void numbers_prepare(PyObject *pace, PyObject *numbers) {
    pace_type = (PyTypeObject *)pace;
    numbers_type = (PyTypeObject *)numbers;
}

static bool are_numbers(PyObject *object) {
    if (PyObject_TypeCheck(object, numbers_type)) return true;
    PyErr_SetString(PyExc_TypeError, "not the numbers of a load");
    return false;
}

static PyObject *none(void) {
    Py_IncRef(Py_None); /* kvstate/native/module.c says why */
    return Py_None;
}

/* --- the pace --- */

static PyObject *pace_new(PyTypeObject *type, PyObject *Py_UNUSED(given),
                          PyObject *Py_UNUSED(named)) {
    CorePace *self = (CorePace *)PyType_GenericAlloc(type, 0);
    if (!self) return NULL;
    self->slowness = self->pace = 1.0;
    self->is_even = 1;
    return (PyObject *)self;
}

static void pace_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    freefunc free_object = (freefunc)PyType_GetSlot(type, Py_tp_free);
    free_object(self);
    Py_DECREF(type);
}

static PyMemberDef pace_members[] = {
    {"slowness", T_DOUBLE, offsetof(CorePace, slowness), 0, NULL},
    {"pace", T_DOUBLE, offsetof(CorePace, pace), 0, NULL},
    {"is_even", T_BOOL, offsetof(CorePace, is_even), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot pace_slots[] = {
    {Py_tp_doc, "How fast a worker computes; extproc/_core.pyi describes it."},
    {Py_tp_new, pace_new},
    {Py_tp_dealloc, pace_dealloc},
    {Py_tp_members, pace_members},
    {0, NULL},
};

PyType_Spec pace_spec = {"extproc._core.Pace", sizeof(CorePace), 0,
                         Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, pace_slots};

/* --- the numbers --- */

static PyObject *numbers_new(PyTypeObject *type, PyObject *given, PyObject *Py_UNUSED(named)) {
    PyObject *pace;
    if (!PyArg_ParseTuple(given, "O!", pace_type, &pace)) return NULL;
    CoreNumbers *self = (CoreNumbers *)PyType_GenericAlloc(type, 0);
    if (!self) return NULL;
    Py_INCREF(pace);
    self->pace = pace;
    self->backlog_at = self->asked_at = -INFINITY;
    return (PyObject *)self;
}

static int numbers_traverse(PyObject *object, visitproc visit, void *arg) {
    Py_VISIT(((CoreNumbers *)object)->pace);
    Py_VISIT((PyObject *)Py_TYPE(object));
    return 0;
}

static int numbers_clear(PyObject *object) {
    Py_CLEAR(((CoreNumbers *)object)->pace);
    return 0;
}

static void numbers_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    freefunc free_object = (freefunc)PyType_GetSlot(type, Py_tp_free);
    PyObject_GC_UnTrack(self);
    (void)numbers_clear(self);
    free_object(self);
    Py_DECREF(type);
}

static double passed_until(const CoreNumbers *self, double now) {
    double passed = now - self->backlog_at;
    return passed > 0.0 ? passed : 0.0;
}

static double lately_at(const CoreNumbers *self, double now, double window) {
    return self->lately_tokens * exp(-passed_until(self, now) / window);
}

static double backlog_at_time(const CoreNumbers *self, double now, double rate) {
    double pace = self->pace ? ((CorePace *)self->pace)->pace : 1.0;
    double left = self->backlog_tokens - passed_until(self, now) * rate * pace;
    return left > 0.0 ? left : 0.0;
}

static void bound(CoreNumbers *self, double backlog, double now, double window) {
    double most = self->booked_tokens + (double)self->shared_tokens;
    self->lately_tokens = lately_at(self, now, window);
    self->backlog_tokens = most < backlog ? most : backlog;
    self->backlog_at = now;
}

/* backlog(now, rate) */
static PyObject *numbers_backlog(CoreNumbers *self, PyObject *const *given, Py_ssize_t count) {
    double each[2];
    if (!numbers_given(given, count, each, 2)) return NULL;
    return PyFloat_FromDouble(backlog_at_time(self, each[0], each[1]));
}

/* lately(now, window) */
static PyObject *numbers_lately(CoreNumbers *self, PyObject *const *given, Py_ssize_t count) {
    double each[2];
    if (!numbers_given(given, count, each, 2)) return NULL;
    return PyFloat_FromDouble(lately_at(self, each[0], each[1]));
}

/* begin(tokens, now, rate, window) */
static PyObject *numbers_begin(CoreNumbers *self, PyObject *const *given, Py_ssize_t count) {
    double each[4];
    if (!numbers_given(given, count, each, 4)) return NULL;
    double tokens = each[0], now = each[1], rate = each[2], window = each[3];
    double left = backlog_at_time(self, now, rate);
    self->in_flight++;
    self->lately_tokens = lately_at(self, now, window) + tokens;
    self->backlog_tokens = left + tokens;
    self->backlog_at = now;
    self->booked_tokens += tokens;
    self->sent_tokens += tokens;
    return PyFloat_FromDouble(left);
}

/* leave(tokens, is_last) */
static PyObject *numbers_leave(CoreNumbers *self, PyObject *const *given, Py_ssize_t count) {
    double each[2];
    if (!numbers_given(given, count, each, 2)) return NULL;
    self->booked_tokens -= each[1] != 0.0 ? self->booked_tokens : each[0];
    return none();
}

/* end(now, rate, window) */
static PyObject *numbers_end(CoreNumbers *self, PyObject *const *given, Py_ssize_t count) {
    double each[3];
    if (!numbers_given(given, count, each, 3)) return NULL;
    double now = each[0], rate = each[1], window = each[2];
    self->in_flight--;
    bound(self, backlog_at_time(self, now, rate), now, window);
    return none();
}

/* bound(backlog, now, window) */
static PyObject *numbers_bound(CoreNumbers *self, PyObject *const *given, Py_ssize_t count) {
    double each[3];
    if (!numbers_given(given, count, each, 3)) return NULL;
    bound(self, each[0], each[1], each[2]);
    return none();
}

/* reported(now, rate, window): what a router tells of its own requests, rounded as Python does. */
static PyObject *numbers_reported(CoreNumbers *self, PyObject *const *given, Py_ssize_t count) {
    double each[3];
    if (!numbers_given(given, count, each, 3)) return NULL;
    double booked = self->booked_tokens + (double)self->shared_tokens;
    double own = booked != 0.0 ? self->booked_tokens / booked : 0.0;
    const double numbers[5] = {(double)self->in_flight, self->booked_tokens, self->sent_tokens,
                               own * backlog_at_time(self, each[0], each[1]),
                               lately_at(self, each[0], each[2])};
    PyObject *gauges = PyTuple_New(5);
    for (Py_ssize_t n = 0; gauges && n < 5; n++) {
        PyObject *number = PyLong_FromDouble(rint(numbers[n]));
        if (!number || PyTuple_SetItem(gauges, n, number)) Py_CLEAR(gauges);
    }
    return gauges;
}

/* How what other routers tell is counted: the time, the configured tokens per second, the seconds in
 * which what was sent fades, and the most tokens that count as sent lately. */
typedef struct {
    double now, rate, window, most;
} SharingRules;

/* Adds what another router told; false if there is no room for it. */
static bool share(CoreNumbers *self, long long requests, long long booked, double queued,
                  double sent, const SharingRules *rules) {
    double left = backlog_at_time(self, rules->now, rules->rate) + queued;
    double lately = lately_at(self, rules->now, rules->window);
    double most = rules->most, ahead = self->ahead_tokens + queued;
    if (self->pace) most *= ((CorePace *)self->pace)->pace;
    if (lately > most) most = lately;
    if (__builtin_add_overflow(self->shared, requests, &requests) ||
        __builtin_add_overflow(self->shared_tokens, booked, &booked)) {
        PyErr_SetString(PyExc_OverflowError, "too many requests or tokens");
        return false;
    }
    self->shared = requests;
    self->shared_tokens = booked;
    lately += sent;
    self->lately_tokens = most < lately ? most : lately;
    self->ahead_tokens = most < ahead ? most : ahead;
    double known = self->booked_tokens + (double)self->shared_tokens;
    self->backlog_tokens = known < left ? known : left;
    self->backlog_at = rules->now;
    return true;
}

/* share(requests, booked, queued, sent, now, rate, window, most) */
static PyObject *numbers_share(CoreNumbers *self, PyObject *const *given, Py_ssize_t count) {
    double each[6];
    if (count != 8) {
        (void)wants(8);
        return NULL;
    }
    long long requests = PyLong_AsLongLong(given[0]), booked = PyLong_AsLongLong(given[1]);
    if (PyErr_Occurred() || !read_numbers(given + 2, each, 6)) return NULL;
    const SharingRules rules = {each[2], each[3], each[4], each[5]};
    return share(self, requests, booked, each[0], each[1], &rules) ? none() : NULL;
}

#define METHOD(name) {#name, (PyCFunction)(void (*)(void))numbers_##name, METH_FASTCALL, NULL}

static PyMethodDef numbers_methods[] = {
    METHOD(backlog), METHOD(lately), METHOD(begin), METHOD(leave),         METHOD(end),
    METHOD(bound),   METHOD(reported),   METHOD(share), {NULL, NULL, 0, NULL},
};

#define NUMBER(name, type) {#name, type, offsetof(CoreNumbers, name), 0, NULL}

static PyMemberDef numbers_members[] = {
    NUMBER(in_flight, T_LONGLONG),    NUMBER(shared, T_LONGLONG),
    NUMBER(shared_tokens, T_LONGLONG), NUMBER(backlog_tokens, T_DOUBLE),
    NUMBER(backlog_at, T_DOUBLE),     NUMBER(lately_tokens, T_DOUBLE),
    NUMBER(booked_tokens, T_DOUBLE),  NUMBER(sent_tokens, T_DOUBLE),
    NUMBER(others, T_DOUBLE),         NUMBER(excess_tokens, T_DOUBLE),
    NUMBER(asked_at, T_DOUBLE),       NUMBER(ahead_tokens, T_DOUBLE),
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot numbers_slots[] = {
    {Py_tp_doc, "The numbers of a load; extproc/_core.pyi describes them."},
    {Py_tp_new, numbers_new},
    {Py_tp_dealloc, numbers_dealloc},
    {Py_tp_traverse, numbers_traverse},
    {Py_tp_clear, numbers_clear},
    {Py_tp_methods, numbers_methods},
    {Py_tp_members, numbers_members},
    {0, NULL},
};

PyType_Spec numbers_spec = {"extproc._core.LoadNumbers", sizeof(CoreNumbers), 0,
                            Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, numbers_slots};

bool numbers_read(PyObject *object, WorkerRecord *record) {
    if (!are_numbers(object)) return false;
    const CoreNumbers *numbers = (CoreNumbers *)object;
    const CorePace *pace = (CorePace *)numbers->pace;
    *record = (WorkerRecord){
        .in_flight = (double)numbers->in_flight,
        .backlog_tokens = numbers->backlog_tokens,
        .backlog_at = numbers->backlog_at,
        .lately_tokens = numbers->lately_tokens,
        .shared = (double)numbers->shared,
        .others = numbers->others,
        .excess_tokens = numbers->excess_tokens,
        .asked_at = numbers->asked_at,
        .slowness = pace ? pace->slowness : 1.0,
        .pace = pace ? pace->pace : 1.0,
        .is_even = !pace || pace->is_even,
        .has_report = numbers->asked_at > -INFINITY,
    };
    return true;
}
